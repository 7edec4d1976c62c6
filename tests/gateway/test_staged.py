"""Encoder, prefill and decode pools behind Envoy, which asks the routers for the frontend of each request."""

import json
import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from gateway.conftest import START_SECONDS
from local.rig import ROOT, Deployment, running
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture


@pytest.fixture(scope="module")
def staged(envoy: str) -> Iterator[Deployment]:
    file = ROOT / "examples" / "demo-disaggregated.yaml"
    with running(file, "--gateway", "envoy", start_seconds=START_SECONDS) as deployment:
        wait_for(deployment.settled, 120, "every worker is verified on every frontend")
        yield deployment


def asked(deployment: Deployment) -> list[int]:
    """How many requests Envoy has asked each picker about."""
    return [deployment.state(number)["gateway_requests"] for number in range(len(deployment.controls))]


def test_request_with_an_image_passes_its_stages_and_both_routers_are_used(staged: Deployment) -> None:
    before = sum(asked(staged))
    routers = set()
    for number in range(8):
        image = {"type": "image_url", "image_url": {"url": data_uri(picture(f"stage {number}", 56, 56))}}
        content = [{"type": "text", "text": f"Visitor {number}. " * 8}, image]
        response = staged.client().chat.completions.with_raw_response.create(
            model="demo", max_tokens=2, messages=[{"role": "user", "content": content}]
        )
        found = staged.mmrouter("explain", staged.url, response.headers["x-mmrouter-request-id"], "--json")
        trace = json.loads(found.stdout)
        routers.add(response.headers["x-mmrouter-request-id"].rpartition("-")[0])
        assert [attempt["outcome"] for attempt in trace["attempts"]] == ["answered 200"]
    assert len(routers) == 2
    assert sum(asked(staged)) - before >= 8


def test_verify_proves_exact_routing_at_the_gateways_address(staged: Deployment) -> None:
    assert httpx.URL(staged.url).port == 8080
    staged.assert_gate_passes()


def test_killed_router_gets_no_request_until_it_is_back(staged: Deployment) -> None:
    def serves() -> bool:
        body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        return httpx.post(f"{staged.url}/v1/chat/completions", json=body, timeout=60).status_code == 200

    os.kill(next(iter(staged.processes("router").values())).pid, signal.SIGKILL)
    wait_for(lambda: all(serves() for _ in range(8)), 60, "the other router serves every request")
    wait_for(staged.settled, 120, "the router is back")
    assert serves()
