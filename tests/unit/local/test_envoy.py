"""Envoy's configuration of a local run."""

from pathlib import Path

import pytest
import yaml

from mmrouter_cli.local import envoy
from mmrouter_cli.local.envoy import DESTINATION, PICKER_PORT, envoy_config
from mmrouter_cli.local.folders import LocalError
from mmrouter_operator.render import frontend
from mmrouter_router.picker import protocol, server

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gateway" / "envoy.yaml"


def test_example_is_what_the_demo_runs():
    pickers = [("127.1.0.5", PICKER_PORT), ("127.1.0.6", PICKER_PORT)]
    made = envoy_config(("127.1.0.1", envoy.GATEWAY_PORT), pickers, admin=Path("envoy.sock"), tls=True)
    assert yaml.safe_load(EXAMPLE.read_text()) == made


def test_every_part_names_the_same_header_and_port():
    assert DESTINATION == protocol.DESTINATION
    assert PICKER_PORT == server.PICKER_PORT == frontend.PICKER_PORT


def test_pickers_with_tls_are_reached_by_http2_over_it_with_any_certificate():
    made = envoy_config(("127.1.0.1", 8080), [("127.1.0.5", 9002)], admin=Path("a"), tls=True)
    (pickers,) = (cluster for cluster in made["static_resources"]["clusters"] if cluster["name"] == "pickers")
    settings = pickers["transport_socket"]["typed_config"]["common_tls_context"]
    assert settings["alpn_protocols"] == ["h2"]
    assert settings["validation_context"] == {"trust_chain_verification": "ACCEPT_UNTRUSTED"}


def test_failing_open_sends_requests_to_the_engines_in_turn():
    engines = [("127.1.0.2", 8000)]
    made = envoy_config(("127.1.0.1", 8080), [("127.1.0.5", 9002)], admin=Path("a"), fail_open_to=engines)
    clusters = {cluster["name"]: cluster for cluster in made["static_resources"]["clusters"]}
    (group,) = clusters["engines"]["load_assignment"]["endpoints"]
    assert [host["endpoint"]["address"]["socket_address"]["address"] for host in group["lb_endpoints"]] == ["127.1.0.2"]


def test_without_envoy_one_sentence_names_the_extra(monkeypatch):
    monkeypatch.setattr(envoy.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LocalError, match=r"mmrouter-k8s\[gateway\]"):
        envoy.find_envoy()


async def test_a_service_at_envoys_port_is_named_before_envoy_starts(run, kit):
    web = kit.deployment("web", kit.server())
    async with run(web, kit.service("web", port=envoy.GATEWAY_PORT)) as cluster:
        with pytest.raises(LocalError, match=f"Envoy needs port {envoy.GATEWAY_PORT}, which a Service has"):
            await cluster.open_gateway(tls=False)
