"""A deployment that runs, from its YAML to answered requests: the real operator, control plane, routers and sidecars.

Engines are simulated, and the local substrate plays the kubelet and the images.
"""

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from urllib.parse import urlsplit

import httpx
import pytest
from cluster.controlplane import ControlPlane
from cluster.load import describe, is_ready, load
from cluster.operators import USER, diagnosed, idle, mmrouter, views
from cluster.resources import MARK, apply, condition, is_done, marked, resource, status
from waiting import wait_for

WINDOW_SECONDS = 60.0
STATUS_SECONDS = 30.0
"""At most one write of a status in so long, while only its numbers change."""


def test_an_idle_resource_is_never_written_and_a_busy_ones_status_at_most_every_30_s(
    real: ControlPlane, proved: str
) -> None:
    with real.namespace() as another:
        generation = apply(real, another, resource("idle"))["metadata"]["generation"]
        wait_for(lambda: is_done(real, another, "idle", generation), 90, "the second deployment is ready")
        idle(real, USER, 3, 60)
        began = time.time()
        with load(real, proved, "demo") as seen:
            wait_for(lambda: time.time() > began + WINDOW_SECONDS, WINDOW_SECONDS + 5, "the window is over")
        rows = real.audit(began)
    assert seen.failures == []
    assert seen.answered > 100
    writes = [row for row in rows if row.user == USER and row.writes and row.resource != "leases"]
    own = ("mmrouterdeployments", "status", "demo")
    statuses = [row for row in writes if (row.resource, row.subresource, row.name) == own]
    assert [str(row) for row in writes if row not in statuses] == []
    assert statuses, "the numbers of a busy deployment reach its status"
    gaps = [later.began - row.began for row, later in pairwise(statuses)]
    assert min(gaps, default=STATUS_SECONDS) > STATUS_SECONDS - 1, gaps


def test_of_pods_the_operator_writes_readiness_gates_and_nothing_else(real: ControlPlane, proved: str) -> None:
    rows = [row for row in real.audit() if row.user == USER and row.resource == "pods" and row.writes]
    assert {(row.verb, row.subresource) for row in rows} == {("patch", "status")}
    assert not {row.code for row in rows} & {401, 403}


REPLICAS = 2
ROLLOUT_SECONDS = 150
"""Pods of a machine with two busy CPUs take 5 to 10 seconds to start, and 5 to announce that they go."""


def marks(plane: ControlPlane, namespace: str, role: str) -> list[str]:
    found = [pod for pod in plane.pods(namespace, deployment="demo", role=role) if is_ready(pod)]
    return [pod["metadata"]["annotations"][MARK] for pod in found]


def test_a_deployment_becomes_ready_and_its_routing_is_proved(real: ControlPlane, proved: str) -> None:
    state = status(real, proved)
    conditions = {found["type"]: found["status"] for found in state["conditions"]}
    assert conditions["ExactRoutingVerified"] == "True", state
    assert conditions["SpecValid"] == conditions["FrontendReady"] == conditions["WorkersReady"] == "True", state
    with load(real, proved, "demo") as seen:
        wait_for(lambda: seen.answered >= 20, 30, "requests are answered")
    assert seen.failures == []
    assert seen.exact == seen.answered


@pytest.mark.parametrize("role", ["worker", "frontend"])
def test_a_rollout_under_load_loses_no_request(real: ControlPlane, proved: str, role: str) -> None:
    body = marked(engine="2") if role == "worker" else marked(engine="2", frontend="2")
    least = REPLICAS
    with load(real, proved, "demo") as seen:
        generation = apply(real, proved, body)["metadata"]["generation"]
        deadline = time.monotonic() + ROLLOUT_SECONDS
        while time.monotonic() < deadline:
            done, now = is_done(real, proved, "demo", generation), marks(real, proved, role)
            least = min(least, len(now))
            assert not done or "1" not in now, "success was reported from old pods"
            if done and now == ["2"] * REPLICAS:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"not rolled out within {ROLLOUT_SECONDS} s\n{describe(real, proved)}", pytrace=False)
        answered = seen.answered
        wait_for(lambda: seen.answered > answered + 5, 20, "the new pods answer")
    assert seen.failures == []
    assert least >= REPLICAS - 1
    assert condition(real, "ExactRoutingVerified", proved)["status"] == "True"


def test_status_shows_both_engines_proved(real: ControlPlane, proved: str) -> None:
    (view,) = views(real, "demo", "-n", proved)
    assert view["phase"] == "Ready"
    assert [(pool["name"], pool["ready"], pool["verified"]) for pool in view["pools"]] == [("worker", 2, 2)]
    assert [worker["exact"] for worker in view["workers"]] == ["True", "True"]
    assert "ExactRoutingVerified" in mmrouter(real, "status", "demo", "-n", proved).stdout


def test_an_engine_that_fell_back_to_a_cpu_is_named_by_condition_and_doctor(real: ControlPlane) -> None:
    gpu = {"name": "worker", "role": "worker", "accelerator": {"kind": "nvidia"}, "args": ["--sim-device=cpu"]}
    with real.namespace() as namespace:
        apply(real, namespace, resource(pools=[gpu]))
        found = wait_for(lambda: condition(real, "DeviceMismatch", namespace), 90, "the engine's device is known")
        (pod,) = (each["metadata"]["name"] for each in real.pods(namespace, deployment="demo", role="worker"))
        seen = diagnosed(real, "demo", "-n", namespace).seen("devices")
    assert (found["status"], found["reason"]) == ("True", "OtherDevice")
    assert f"pod {pod} on cpu instead of cuda" in found["message"]
    assert seen == [f"{pod} computes on cpu, and its pool asks for cuda"]


def test_every_frontend_has_a_live_page_that_is_served_until_ctrl_c(real: ControlPlane, proved: str) -> None:
    argv = [sys.executable, "-m", "mmrouter_cli", "ui", "demo", "-n", proved, f"--kubeconfig={real.kubeconfig}"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        addresses = [urlsplit(process.stdout.readline().strip()) for _ in marks(real, proved, "frontend")]
        for address in addresses:
            page = httpx.get(f"http://{address.netloc}{address.path}", trust_env=False, timeout=30)
            assert page.headers["content-type"].startswith("text/html")
            token = {"authorization": f"Bearer {address.fragment.removeprefix('token=')}"}
            with httpx.stream("GET", f"http://{address.netloc}/control/live", headers=token, timeout=30) as stream:
                lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
                assert '"deployment":"demo"' in next(lines)
                shown = next(parts["rollout"] for line in lines if "rollout" in (parts := json.loads(line)))
            live = status(real, proved)["conditions"]
            assert {(each["type"], each["reason"]) for each in shown["conditions"]} == {
                (each["type"], each["reason"]) for each in live
            }
            assert [(pool["name"], pool["verified"]) for pool in shown["pools"]] == [("worker", 2)]
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, "Traceback" in errors) == (0, False), errors
        assert "until ctrl-C" in errors
    finally:
        process.kill()


def test_a_deployment_without_frontends_has_no_page(real: ControlPlane) -> None:
    done = mmrouter(real, "ui", "absent", "-n", "default")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no frontend of a deployment absent runs in namespace default" in done.stderr
