"""A deployment behind Envoy Gateway, whose own policies send requests to the pickers and then where these say."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from artefacts import envoy_program, go_programs
from cluster.envoy_gateway import envoy_gateway
from cluster.istio import free_port
from local.rig import Deployment, deployed, example
from scenarios import SCENARIOS, Folder, Scenario, open_chat, title, web
from waiting import wait_for

from mmrouter_cli.local.envoy import DESTINATION

__all__ = ["web"]

pytestmark = pytest.mark.long_form
SECONDS = 120


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The demo, with the Gateway's address in the place of its own."""
    envoy, program = envoy_program(), go_programs("envoy-gateway") / "envoy-gateway"
    resource = example()
    resource["spec"]["frontend"]["mode"] = "endpointPicker"
    with ExitStack() as stack:
        made = stack.enter_context(deployed(tmp_path_factory.mktemp("demo"), resource, start_seconds=SECONDS))
        wait_for(made.settled, SECONDS, "every worker is verified on every frontend")
        pickers = [str(httpx.URL(control).host) for control in made.controls]
        engines = [worker["ip"] for worker in made.workers("worker")]
        folder = tmp_path_factory.mktemp("gateway")
        url = stack.enter_context(envoy_gateway(program, envoy, folder, free_port(), pickers, engines))
        yield replace(made, run={**made.run, "endpoint": url})


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario_through_the_gateway(scenario: Scenario, behind: Deployment, web: Folder) -> None:
    def asked() -> int:
        return sum(int(behind.state(number)["gateway_requests"]) for number in range(len(behind.controls)))

    before = asked()
    with open_chat(behind) as chat:
        scenario(chat, web)
    assert asked() > before


def test_verify_proves_exact_routing_at_the_gateways_address(behind: Deployment) -> None:
    behind.assert_gate_passes(f"--control={behind.controls[0]}", f"--token={behind.token}")


def test_client_cannot_choose_the_engine_by_the_pickers_header(behind: Deployment) -> None:
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "Tell of the sea. " * 20}]}
    named = [{DESTINATION: f"{worker['ip']}:8000"} for worker in behind.workers("worker")]
    answers = [
        httpx.post(
            f"{behind.url}/v1/chat/completions",
            json=body,
            headers={**header, "x-mmrouter-control": behind.token},
            timeout=60,
        )
        for header in [{}, *named]
    ]
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert len({answer.headers["x-mmrouter-worker"] for answer in answers}) == 1
