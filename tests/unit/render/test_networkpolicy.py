"""Who reaches whom: the rendered policies, read as a network plugin reads them."""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from label_selectors import selects
from unit.render.objects import children

from mmrouter_lib.api import MMRouterDeployment, to_json
from mmrouter_operator.model.config import OperatorConfig

Change = Callable[..., MMRouterDeployment]
API_SERVER = "192.0.2.1"
SITE = OperatorConfig(api_server_cidrs=(f"{API_SERVER}/32",), pod_cidrs=("10.244.0.0/16",))


@dataclass(frozen=True)
class Pod:
    labels: dict[str, str] = field(hash=False)
    namespace: str = "inference"
    address: str = "10.244.0.9"


@dataclass(frozen=True)
class Host:
    """Something outside the cluster's pods."""

    address: str


def frontend(deployment: str = "qwen-vl", namespace: str = "inference") -> Pod:
    return Pod({"mmrouter.io/deployment": deployment, "mmrouter.io/role": "frontend"}, namespace)


def engine(pool: str = "big", role: str = "worker", deployment: str = "qwen-vl") -> Pod:
    return Pod({"mmrouter.io/deployment": deployment, "mmrouter.io/pool": pool, "mmrouter.io/role": role})


OPERATOR = Pod({"app.kubernetes.io/name": "mmrouter-operator"}, "mmrouter-system")
STRANGER = Pod({"app": "shop"}, "shop")
INTERNET = Host("8.8.8.8")
METADATA = Host("169.254.169.254")
INTRANET = Host("10.9.9.9")


def is_peer(peer: dict[str, Any], whom: Pod | Host) -> bool:
    if "ipBlock" in peer:
        address = ipaddress.ip_address(whom.address)
        inside = address in ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return inside and not any(address in ipaddress.ip_network(c) for c in peer["ipBlock"].get("except", []))
    if isinstance(whom, Host):
        return False
    # No namespaceSelector: the policy's own namespace. An empty one: every namespace.
    assert peer.get("namespaceSelector", {}) == {}
    here = "namespaceSelector" in peer or whom.namespace == "inference"
    return here and selects(peer.get("podSelector", {}), whom.labels)


def fits(rule: dict[str, Any], side: str, whom: Pod | Host, port: int, protocol: str) -> bool:
    ports = any(
        entry["protocol"] == protocol
        and ("port" not in entry or entry["port"] <= port <= entry.get("endPort", entry["port"]))
        for entry in rule["ports"]
    )
    return ports and (side not in rule or any(is_peer(peer, whom) for peer in rule[side]))


def passes(
    policies: list[dict[str, Any]], source: Pod | Host, target: Pod | Host, port: int, protocol: str = "TCP"
) -> bool:
    """Whether a connection is let out by the source's policies and in by the target's."""
    for pod, whom, direction, side in ((source, target, "egress", "to"), (target, source, "ingress", "from")):
        if isinstance(pod, Host) or pod.namespace != "inference":
            continue
        specs = [p["spec"] for p in policies if selects(p["spec"]["podSelector"], pod.labels)]
        if specs and not any(fits(rule, side, whom, port, protocol) for spec in specs for rule in spec[direction]):
            return False
    return True


@pytest.fixture
def closed(whole: MMRouterDeployment, changed: Change) -> MMRouterDeployment:
    """Weights on a volume, and no fetching."""
    return changed(whole, routing={})


def test_policies_are_valid_for_the_api(
    whole: MMRouterDeployment,
    shortest: MMRouterDeployment,
    changed: Change,
    valid: Callable[[list[dict[str, Any]]], None],
) -> None:
    media = {"fetch": "allowList", "allowedHosts": ["images.example"], "allowedCIDRs": ["10.1.0.0/16"]}
    rich = changed(shortest, routing={"media": media}, observability={"otlpEndpoint": "http://otel:4318"})
    for dep in (whole, shortest, rich, disaggregated(shortest, changed)):
        valid(children(dep, "NetworkPolicy", config=SITE))
        valid(children(dep, "NetworkPolicy", config=OperatorConfig()))


def test_there_is_none_where_they_are_off(whole: MMRouterDeployment, changed: Change) -> None:
    assert children(changed(whole, networkPolicy={"enabled": False}), "NetworkPolicy", config=SITE) == []


def test_every_pod_of_the_deployment_is_closed_in_both_directions(whole: MMRouterDeployment) -> None:
    policies = children(whole, "NetworkPolicy", config=SITE)
    for pod in (frontend(), engine("big"), engine("host"), engine("r", "renderer")):
        assert any(selects(policy["spec"]["podSelector"], pod.labels) for policy in policies)
    assert all(policy["spec"]["policyTypes"] == ["Ingress", "Egress"] for policy in policies)


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        (STRANGER, frontend(), 8000),
        (INTERNET, frontend(), 8000),
        (STRANGER, frontend(), 9090),
        (STRANGER, engine(), 9090),
        (OPERATOR, frontend(), 8001),
        (frontend(), frontend(), 8001),
        (frontend(), engine(), 8000),
        (frontend(), engine(), 7557),
        (frontend(), engine(), 7558),
        (frontend(), engine("r", "renderer"), 8000),
        (frontend(), Host(API_SERVER), 6443),
        (frontend(), Host(API_SERVER), 443),
    ],
)
def test_what_the_deployment_needs_gets_through(
    closed: MMRouterDeployment, source: Pod | Host, target: Pod | Host, port: int
) -> None:
    assert passes(children(closed, "NetworkPolicy", config=SITE), source, target, port)


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        (STRANGER, engine(), 8000),
        (STRANGER, engine(), 7557),
        (INTERNET, engine(), 8000),
        (INTERNET, engine(), 9090),
        (STRANGER, frontend(), 8001),
        (INTERNET, frontend(), 8001),
        (INTERNET, frontend(), 9090),
        (OPERATOR, engine(), 8000),
        (frontend("other"), engine(), 8000),
        (frontend("qwen-vl", "elsewhere"), engine(), 8000),
        (frontend("other"), frontend(), 8001),
        (frontend(), engine(deployment="other"), 8000),
        (frontend(), engine(), 5557),
        (engine("big"), engine("mig"), 8000),
        (engine("big"), engine("mig"), 7557),
        (engine("big"), engine("mig"), 5600),
        (engine("big"), engine("mig"), 40000),
        (engine(), frontend(), 8001),
        (engine(), INTERNET, 443),
        (engine(), INTRANET, 443),
        (engine(), Host(API_SERVER), 443),
        (engine(), METADATA, 80),
        (frontend(), INTERNET, 443),
        (frontend(), INTERNET, 80),
        (frontend(), INTRANET, 80),
        (frontend(), METADATA, 80),
        (frontend(), STRANGER, 80),
    ],
)
def test_nothing_else_gets_through(
    closed: MMRouterDeployment, source: Pod | Host, target: Pod | Host, port: int
) -> None:
    assert not passes(children(closed, "NetworkPolicy", config=SITE), source, target, port)


@pytest.mark.parametrize("pod", [frontend(), engine()])
def test_names_are_resolved_wherever_the_name_server_is(closed: MMRouterDeployment, pod: Pod) -> None:
    policies = children(closed, "NetworkPolicy", config=SITE)
    for server in (STRANGER, INTERNET, Host("169.254.20.10")):
        for protocol in ("UDP", "TCP"):
            assert passes(policies, pod, server, 53, protocol)
    assert passes(policies, pod, STRANGER, 5353, "UDP")  # OpenShift


def test_weights_come_from_the_hub_only_where_there_is_no_volume(
    closed: MMRouterDeployment, shortest: MMRouterDeployment
) -> None:
    for pod in (frontend(), engine("worker")):
        assert passes(children(shortest, "NetworkPolicy", config=SITE), pod, INTERNET, 443)
        assert not passes(children(shortest, "NetworkPolicy", config=SITE), pod, METADATA, 80)
        assert not passes(children(closed, "NetworkPolicy", config=SITE), pod, INTERNET, 443)


def test_nothing_private_is_reached_for_the_hub_unless_the_site_names_a_mirror(shortest: MMRouterDeployment) -> None:
    mirrored = SITE.model_copy(update={"hub_endpoint": "https://mirror.example"})
    of_public_numbers = SITE.model_copy(update={"pod_cidrs": ("8.8.8.0/24",)})
    for pod in (frontend(), engine("worker")):
        for private in (INTRANET, STRANGER, Host("fd00::7")):
            assert not passes(children(shortest, "NetworkPolicy", config=SITE), pod, private, 443)
            assert passes(children(shortest, "NetworkPolicy", config=mirrored), pod, private, 443)
        assert not passes(children(shortest, "NetworkPolicy", config=SITE), pod, INTERNET, 80)
        assert not passes(children(shortest, "NetworkPolicy", config=of_public_numbers), pod, INTERNET, 443)


def test_a_mirror_of_the_hub_may_be_pods_on_any_port(shortest: MMRouterDeployment, closed: MMRouterDeployment) -> None:
    config = SITE.model_copy(update={"hub_endpoint": "http://mirror.models.svc:8080"})
    for pod in (frontend(), engine("worker")):
        assert passes(children(shortest, "NetworkPolicy", config=config), pod, STRANGER, 8080)
        assert passes(children(shortest, "NetworkPolicy", config=config), pod, INTRANET, 8080)
        assert not passes(children(shortest, "NetworkPolicy", config=SITE), pod, STRANGER, 8080)
        assert not passes(children(shortest, "NetworkPolicy", config=config), pod, METADATA, 8080)
        assert not passes(children(closed, "NetworkPolicy", config=config), pod, STRANGER, 8080)


@pytest.mark.parametrize(
    ("media", "reached", "refused"),
    [
        ({"fetch": "public"}, [(INTERNET, 80), (INTERNET, 443)], [(INTRANET, 80), (INTERNET, 8080), (METADATA, 80)]),
        (
            {"fetch": "allowList", "allowedHosts": ["a.example"]},
            [(INTERNET, 443), (INTERNET, 8443)],
            [(INTRANET, 443), (METADATA, 80)],
        ),
        (
            {"fetch": "public", "allowedCIDRs": ["10.9.0.0/16"]},
            [(INTERNET, 443), (INTRANET, 9000)],
            [(INTERNET, 9000), (Host("10.8.0.1"), 443), (METADATA, 80)],
        ),
        ({"fetch": "dataOnly"}, [], [(INTERNET, 443), (INTERNET, 80), (INTRANET, 443)]),
    ],
)
def test_only_frontends_that_fetch_get_out_and_only_as_far_as_their_guard_lets_them(
    whole: MMRouterDeployment,
    changed: Change,
    media: dict[str, Any],
    reached: list[tuple[Host, int]],
    refused: list[tuple[Host, int]],
) -> None:
    policies = children(changed(whole, routing={"media": media}), "NetworkPolicy", config=SITE)
    assert [passes(policies, frontend(), host, port) for host, port in reached] == [True] * len(reached)
    assert [passes(policies, frontend(), host, port) for host, port in refused] == [False] * len(refused)
    assert not any(passes(policies, engine(), host, port) for host, port in reached)


def test_pods_are_no_public_hosts(whole: MMRouterDeployment) -> None:
    config = SITE.model_copy(update={"pod_cidrs": ("8.8.8.0/24",)})
    assert not passes(children(whole, "NetworkPolicy", config=config), frontend(), INTERNET, 443)


def test_without_the_sites_word_the_api_server_may_be_anywhere(closed: MMRouterDeployment) -> None:
    policies = children(closed, "NetworkPolicy", config=OperatorConfig())
    assert passes(policies, frontend(), Host(API_SERVER), 6443)
    assert passes(policies, frontend(), INTERNET, 443)
    assert not passes(policies, frontend(), INTERNET, 80)
    assert not passes(policies, engine(), Host(API_SERVER), 6443)


def test_traces_reach_their_collector(closed: MMRouterDeployment, changed: Change) -> None:
    policies = children(
        changed(closed, observability={"otlpEndpoint": "http://10.9.9.9:4318"}), "NetworkPolicy", config=SITE
    )
    assert passes(policies, frontend(), INTRANET, 4318)
    assert not passes(policies, frontend(), INTERNET, 4318)
    assert not passes(policies, engine(), INTRANET, 4318)


def test_only_engines_that_transfer_reach_each_other(shortest: MMRouterDeployment, changed: Change) -> None:
    policies = children(disaggregated(shortest, changed), "NetworkPolicy", config=SITE)
    prefill, decode, render = engine("p", "prefill"), engine("d", "decode"), engine("r", "renderer")
    for port in (5600, 5663, 14579, 40000):
        assert passes(policies, prefill, decode, port)
        assert passes(policies, decode, prefill, port)
        assert not passes(policies, render, decode, port)
        assert not passes(policies, prefill, render, port)
        assert not passes(policies, STRANGER, decode, port)
        assert not passes(policies, prefill, engine("d", "decode", "other"), port)
    for port in (8000, 7557, 7558, 5557):
        assert not passes(policies, prefill, decode, port)


def disaggregated(shortest: MMRouterDeployment, changed: Change) -> MMRouterDeployment:
    pool = {key: value for key, value in to_json(shortest)["spec"]["pools"][0].items() if key in {"accelerator"}}
    roles = {"p": "prefill", "d": "decode", "r": "renderer"}
    return changed(shortest, pools=[{**pool, "name": name, "role": role} for name, role in roles.items()])
