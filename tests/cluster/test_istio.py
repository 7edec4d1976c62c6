"""A deployment behind a real gateway: Istio's control plane takes the InferencePool that the operator makes, and has a
stock Envoy ask the deployment's pickers.
"""

import base64
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from artefacts import envoy_program, go_programs
from cluster.conftest import CRDS, ROOT
from cluster.controlplane import ControlPlane, control_plane
from cluster.deployments import MERGE
from cluster.hollow_kubelet import hollow
from cluster.istio import GATEWAY, Istio, istio, local_network
from cluster.load import describe
from cluster.operators import diagnosed, operator, views
from cluster.resources import apply, condition, get, is_done, path, resource
from cluster.runner import LocalRunner
from doc_commands import on_gateway_page
from e2e.endpoints import Reached
from local.rig import pod_processes
from waiting import answers_ok, wait_for

from mmrouter_cli.local import loopback_network
from mmrouter_operator.model.kinds import RESOURCE

pytestmark = pytest.mark.long_form
NAME = "demo"
SECONDS = 60
REFUSED = 10
MODEL_HEADER = "x-gateway-model-name"
TEXT = "The harbour lies still in the early light and the boats wait for the tide to turn. " * 8


@pytest.fixture(scope="module")
def envoy() -> str:
    return envoy_program()


@pytest.fixture(scope="module")
def controlled(envoy: str, kube_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Istio]:
    """Istio on a control plane whose pods run as processes, at addresses that are not loopback."""
    programs = go_programs("istio")
    with ExitStack() as stack:
        network = stack.enter_context(local_network())
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(loopback_network, "NETWORK", network)
        plane = stack.enter_context(control_plane(tmp_path_factory.mktemp("istio"), kube_bin, CRDS))
        plane.apply_crds(programs / "crds")
        kubelet = stack.enter_context(hollow(plane, LocalRunner(plane, ROOT / "examples")))
        kubelet.node("local")
        stack.enter_context(operator(plane))
        yield stack.enter_context(istio(plane, programs))


@dataclass(frozen=True)
class Behind:
    """A deployment behind the Gateway. ``reached``: at the Gateway's address."""

    plane: ControlPlane
    namespace: str
    reached: Reached

    def ask(self, text: str, **headers: str) -> httpx.Response:
        body = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
        headers["x-mmrouter-control"] = self.reached.token
        url = f"{self.reached.url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def demo(controlled: Istio, envoy: str) -> Iterator[Behind]:
    plane = controlled.plane
    with plane.namespace() as namespace, controlled.gateway(envoy, namespace) as url:
        for kind in ("DestinationRule", "NetworkPolicy"):
            text = on_gateway_page(kind, NAME=NAME, GATEWAY_NAMESPACE=namespace)
            made = plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=text)
            assert made.returncode == 0, made.stderr
        body = resource(NAME, frontends=2, replicas=2)
        body["spec"]["frontend"] |= {"mode": "endpointPicker", "gateway": {"parentRefs": [{"name": GATEWAY}]}}
        generation = apply(plane, namespace, body)["metadata"]["generation"]
        done = partial(is_done, plane, namespace, NAME, generation)
        wait_for(done, 90, "Ready is True", known=partial(describe, plane, namespace))
        data = get(plane, "Secret", namespace, f"{NAME}-secrets")["data"]
        frontends = plane.pods(namespace, deployment=NAME, role="frontend")
        controls = tuple(f"http://{pod['status']['podIP']}:8001" for pod in frontends)
        behind = Behind(plane, namespace, Reached(url, controls, base64.b64decode(data["control.token"]).decode()))
        wait_for(partial(answers_ok, f"{url}/v1/models"), SECONDS, "the Gateway serves", known=controlled.log)
        yield behind


def test_pool_and_route_are_accepted_and_status_and_doctor_say_so(demo: Behind) -> None:
    accepted = wait_for(
        lambda: (found := condition(demo.plane, "GatewayAccepted", demo.namespace)).get("status") == "True" and found,
        SECONDS,
        "GatewayAccepted is True",
        known=partial(describe, demo.plane, demo.namespace),
    )
    gateway = f"Gateway {demo.namespace}/{GATEWAY}"
    assert f"{gateway} accepts InferencePool {NAME}" in accepted["message"]
    pool: Any = get(demo.plane, "InferencePool", demo.namespace, NAME)
    states = {each["type"]: each["status"] for each in pool["status"]["parents"][0]["conditions"]}
    assert states == {"Accepted": "True", "ResolvedRefs": "True"}
    (view,) = views(demo.plane, NAME, "-n", demo.namespace)
    shown = {each["type"]: each["status"] for each in view["conditions"]}
    assert shown["GatewayAccepted"] == "True"
    # As in a pod: the pods' addresses are reached without a kubelet.
    report = diagnosed(
        demo.plane, NAME, "-n", demo.namespace, env={**os.environ, "KUBERNETES_SERVICE_HOST": demo.plane.address}
    )
    assert report.problems == []
    summary = report.seen("gateway", "ok")
    assert f"{gateway} accepts InferencePool {NAME}" in summary
    assert sum("serves gateways by TLS" in each for each in summary) == 2, summary
    assert any(each.startswith("gateways have asked the pickers") for each in summary), summary


def test_a_repeated_prompt_is_answered_by_the_engine_that_holds_its_blocks(demo: Behind) -> None:
    workers = set()
    for number in range(8):
        answers = [demo.ask(f"Visitor {number}. {TEXT}") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3, answers[-1].text
        (worker,) = {answer.headers["x-mmrouter-worker"] for answer in answers}
        cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[1] == cached[2] > cached[0]
        workers.add(worker)
    assert len(workers) == 2, "both engines get prompts"


def test_verify_proves_exact_routing_at_the_gateways_address(demo: Behind) -> None:
    done = demo.reached.mmrouter("verify")
    assert done.returncode == 0, done.stdout + done.stderr


def test_with_a_model_header_the_route_takes_only_requests_for_the_deployment(demo: Behind) -> None:
    def named(header: str | None) -> None:
        body = {"spec": {"frontend": {"gateway": {"modelHeader": header}}}}
        demo.plane.request("PATCH", path(RESOURCE, demo.namespace, NAME), body, MERGE).raise_for_status()

    named(MODEL_HEADER)
    wait_for(lambda: demo.ask(TEXT).status_code == 404, SECONDS, "a request without the header has no route")
    assert demo.ask(TEXT, **{MODEL_HEADER: "another"}).status_code == 404
    assert demo.ask(TEXT, **{MODEL_HEADER: NAME}).status_code == 200
    named(None)
    wait_for(lambda: demo.ask(TEXT).status_code == 200, SECONDS, "every request has the route again")


def test_without_a_picker_requests_are_refused_and_served_again_when_one_is_back(demo: Behind) -> None:
    statuses = list[int]()

    def refused() -> bool:
        for process in pod_processes(os.getpid(), "router").values():
            process.send_signal(signal.SIGKILL)
        statuses.append(demo.ask(TEXT).status_code)
        return sum(status != 200 for status in statuses) >= REFUSED

    wait_for(refused, SECONDS, f"{REFUSED} requests are refused")
    wait_for(lambda: demo.ask(TEXT).status_code == 200, SECONDS, "a picker is back")
    # With FailOpen some reach an engine, which answers 401 without the key that pickers add.
    assert set(statuses) <= {200, 500, 503}
