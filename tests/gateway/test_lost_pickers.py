"""Pickers and Envoy, killed under load; a gateway that refuses requests without a picker, and one that fails open."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from artefacts import Record
from gateway.load import Load
from local.rig import Deployment
from waiting import answers_ok, wait_for

from mmrouter_cli.local.envoy import PICKER_PORT, envoy_config

OPEN_PORT = 8090


@pytest.fixture
def deployment(settled: Deployment) -> Deployment:
    """The deployment of the other files: each test waits until what it killed is back."""
    return settled


@contextmanager
def second_envoy(envoy: str, deployment: Deployment, folder: Path) -> Iterator[str]:
    """Another gateway of the same pickers, which fails open to the engines."""
    host = str(httpx.URL(deployment.url).host)
    pickers = [(str(httpx.URL(control).host), PICKER_PORT) for control in deployment.controls]
    engines = [(worker["ip"], 8000) for worker in deployment.workers("worker")]
    config = envoy_config((host, OPEN_PORT), pickers, admin=folder / "admin.sock", tls=True, fail_open_to=engines)
    file = folder / "envoy.json"
    file.write_text(json.dumps(config))
    process = subprocess.Popen([envoy, "-c", str(file), "--disable-hot-restart", "--log-level", "error"])
    url = f"http://{host}:{OPEN_PORT}"
    try:
        wait_for(lambda: answers_ok(f"{url}/v1/models"), 60, "the second gateway serves")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def test_killed_picker_loses_requests_only_until_it_is_back(deployment: Deployment, record: Record) -> None:
    load = Load(deployment.url)
    with load.asking():
        load.more(40)
        os.kill(next(iter(deployment.processes("router").values())).pid, signal.SIGKILL)
        load.more(200)
        with load.slowly():
            wait_for(deployment.settled, 120, "the picker is back")
        load.answered_without_a_loss(40)
    # How many are lost depends on how soon a client asks again: Envoy takes two failed checks to leave a picker.
    record("requests lost when one of two pickers is killed under 8 clients (FailClose)", dict(load.statuses))
    assert load.statuses.keys() <= {0, 200, 500, 503}


def test_killed_envoy_is_back_and_leaves_nothing_booked(deployment: Deployment, record: Record) -> None:
    run, routers = psutil.Process(deployment.process.pid), range(len(deployment.controls))

    def envoy() -> psutil.Process | None:
        for child in run.children():
            with suppress(psutil.NoSuchProcess):  # one that ended since it was listed
                if child.name() == "envoy":
                    return child
        return None

    def asked() -> list[int]:
        return [deployment.state(number)["gateway_requests"] for number in routers]

    def under_way() -> int:
        return sum(worker["in_flight"] for number in routers for worker in deployment.state(number)["workers"])

    killed, load = envoy(), Load(deployment.url)
    assert killed
    with load.asking():
        load.more(40)
        killed.kill()
        wait_for(lambda: envoy() not in (None, killed), 10, "Envoy runs again")
        before = asked()
        load.answered_without_a_loss(40)
    refused = sum(fault.startswith("ConnectError") for fault in load.faults)
    lost = {"broken": load.statuses[0] - refused, "answered 5xx": load.statuses[500] + load.statuses[503]}
    record("requests lost when Envoy is killed under 8 clients", {**lost, "answered": load.statuses[200]})
    assert load.statuses.keys() <= {0, 200, 500, 503}
    assert all(now > then for now, then in zip(asked(), before, strict=True)), "the new Envoy asks both pickers"
    wait_for(lambda: under_way() == 0, 60, "nothing of the killed Envoy is booked")
    deployment.assert_gate_passes()


def test_without_a_picker_no_engine_answers_an_unauthenticated_request(
    envoy: str, deployment: Deployment, tmp_path: Path, record: Record
) -> None:
    with second_envoy(envoy, deployment, tmp_path) as url:
        load = Load(url)
        with load.asking():
            load.more(20)
            for process in deployment.processes("router").values():
                os.kill(process.pid, signal.SIGKILL)
            with load.slowly():
                wait_for(lambda: load.statuses[401] > 0, 60, "an engine refuses a request")
                wait_for(deployment.settled, 120, "the pickers are back")
            load.more(40)
        record("requests when both pickers are killed under 8 clients (FailOpen)", dict(load.statuses))
    assert load.statuses.keys() <= {0, 200, 401, 500, 502, 503, 504}
