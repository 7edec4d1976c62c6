"""Who reaches whom: the rendered policies, read as a network plugin reads them."""

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from unit.render.objects import SHORTEST, WHOLE, change, children, selects, valid

from mmrouter_lib.api import MMRouterDeployment, SpecError, to_json
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.networkpolicy import anywhere, collector, public, ranges
from mmrouter_router.media.guard import refusal

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
PORTS = (80, 443, 5557, 5600, 6443, 7557, 7558, 8000, 8001, 9090, 40000)


def is_peer(peer: dict[str, Any], whom: Pod | Host) -> bool:
    if "ipBlock" in peer:
        return open_to([peer], ipaddress.ip_address(whom.address))
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


def policies(dep: MMRouterDeployment, **settings: Any) -> list[dict[str, Any]]:
    """Return a deployment's policies with the site's settings, some of them changed."""
    return children(dep, "NetworkPolicy", config=SITE.model_copy(update=settings))


@pytest.fixture
def closed() -> MMRouterDeployment:
    """Weights on a volume, and no fetching."""
    return change(WHOLE, routing={})


def test_policies_are_valid_for_the_api() -> None:
    media = {"fetch": "allowList", "allowedHosts": ["images.example"], "allowedCIDRs": ["10.1.0.0/16"]}
    rich = change(SHORTEST, routing={"media": media}, observability={"otlpEndpoint": "http://otel:4318"})
    for dep in (WHOLE, SHORTEST, rich, disaggregated()):
        valid(policies(dep))
        valid(children(dep, "NetworkPolicy", config=OperatorConfig()))


def test_there_is_none_where_they_are_off() -> None:
    assert policies(change(WHOLE, networkPolicy={"enabled": False})) == []


def test_a_port_for_the_live_page_opens_the_control_port_of_frontends() -> None:
    opened = policies(change(WHOLE, frontend={"service": {"pagePort": 9000}}))
    assert passes(opened, STRANGER, frontend(), 8001)
    assert not passes(policies(WHOLE), STRANGER, frontend(), 8001)


@pytest.mark.parametrize(
    ("source", "target", "reached"),
    [
        (STRANGER, frontend(), (8000, 9090)),
        (INTERNET, frontend(), (8000,)),
        (STRANGER, engine(), (9090,)),
        (OPERATOR, frontend(), (8000, 8001, 9090)),
        (frontend(), frontend(), (8000, 8001)),
        (frontend(), engine(), (8000, 7557, 7558)),
        (frontend(), engine("r", "renderer"), (8000, 7557, 7558)),
        (frontend(), Host(API_SERVER), (6443, 443)),
        (INTERNET, engine(), ()),
        (OPERATOR, engine(), (9090,)),
        (frontend("other"), engine(), (9090,)),
        (frontend("qwen-vl", "elsewhere"), engine(), (9090,)),
        (frontend("other"), frontend(), (8000, 9090)),
        (frontend(), engine(deployment="other"), ()),
        (engine("big"), engine("mig"), ()),
        (engine(), frontend(), ()),
        (engine(), INTERNET, ()),
        (engine(), INTRANET, ()),
        (engine(), Host(API_SERVER), ()),
        (engine(), METADATA, ()),
        (frontend(), INTERNET, ()),
        (frontend(), INTRANET, ()),
        (frontend(), METADATA, ()),
        (frontend(), STRANGER, ()),
    ],
)
def test_what_the_deployment_needs_gets_through_and_nothing_else(
    closed: MMRouterDeployment, source: Pod | Host, target: Pod | Host, reached: tuple[int, ...]
) -> None:
    of_closed = policies(closed)
    assert {port for port in PORTS if passes(of_closed, source, target, port)} == set(reached)


@pytest.mark.parametrize("pod", [frontend(), engine()])
def test_names_are_resolved_wherever_the_name_server_is(closed: MMRouterDeployment, pod: Pod) -> None:
    for server in (STRANGER, INTERNET, Host("169.254.20.10")):
        for protocol in ("UDP", "TCP"):
            assert passes(policies(closed), pod, server, 53, protocol)
    assert passes(policies(closed), pod, STRANGER, 5353, "UDP")  # OpenShift


PRIVATE = (INTRANET, STRANGER, Host("fd00::7"))


@pytest.mark.parametrize(
    ("site", "reached", "refused"),
    [
        ({}, [(INTERNET, 443)], [(INTERNET, 80), (METADATA, 80), (STRANGER, 8080), *((one, 443) for one in PRIVATE)]),
        ({"pod_cidrs": ("8.8.8.0/24",)}, [], [(INTERNET, 443)]),
        ({"hub_endpoint": "https://mirror.example"}, [(one, 443) for one in PRIVATE], [(METADATA, 443)]),
        ({"hub_endpoint": "http://mirror.svc:8080"}, [(STRANGER, 8080), (INTRANET, 8080)], [(METADATA, 8080)]),
    ],
    ids=["the public hub", "pods with public addresses", "a mirror may be private", "a mirror may be pods on any port"],
)
@pytest.mark.parametrize("pod", [frontend(), engine("worker")])
def test_weights_come_from_the_hub_or_its_mirror_and_only_where_there_is_no_volume(
    closed: MMRouterDeployment,
    site: dict[str, Any],
    reached: list[tuple[Pod | Host, int]],
    refused: list[tuple[Pod | Host, int]],
    pod: Pod,
) -> None:
    assert all(passes(policies(SHORTEST, **site), pod, whom, port) for whom, port in reached)
    assert not any(passes(policies(SHORTEST, **site), pod, whom, port) for whom, port in refused)
    assert not any(passes(policies(closed, **site), pod, whom, port) for whom, port in reached)


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
    media: dict[str, Any], reached: list[tuple[Host, int]], refused: list[tuple[Host, int]]
) -> None:
    fetching = policies(change(WHOLE, routing={"media": media}))
    assert all(passes(fetching, frontend(), host, port) for host, port in reached)
    assert not any(passes(fetching, frontend(), host, port) for host, port in refused)
    assert not any(passes(fetching, engine(), host, port) for host, port in reached)


def test_pods_are_no_public_hosts() -> None:
    assert not passes(policies(WHOLE, pod_cidrs=("8.8.8.0/24",)), frontend(), INTERNET, 443)


def test_without_the_sites_word_the_api_server_may_be_anywhere(closed: MMRouterDeployment) -> None:
    anywhere_closed = children(closed, "NetworkPolicy", config=OperatorConfig())
    assert passes(anywhere_closed, frontend(), Host(API_SERVER), 6443)
    assert passes(anywhere_closed, frontend(), INTERNET, 443)
    assert not passes(anywhere_closed, frontend(), INTERNET, 80)
    assert not passes(anywhere_closed, engine(), Host(API_SERVER), 6443)


def test_traces_reach_their_collector(closed: MMRouterDeployment) -> None:
    traced = policies(change(closed, observability={"otlpEndpoint": "http://10.9.9.9:4318"}))
    assert passes(traced, frontend(), INTRANET, 4318)
    assert not passes(traced, frontend(), INTERNET, 4318)
    assert not passes(traced, engine(), INTRANET, 4318)


def test_only_engines_that_transfer_reach_each_other() -> None:
    exchanging = policies(disaggregated())
    prefill, decode, render = engine("p", "prefill"), engine("d", "decode"), engine("r", "renderer")
    for port in (5600, 5663, 14579, 40000):
        assert passes(exchanging, prefill, decode, port)
        assert passes(exchanging, decode, prefill, port)
        assert not passes(exchanging, render, decode, port)
        assert not passes(exchanging, prefill, render, port)
        assert not passes(exchanging, STRANGER, decode, port)
        assert not passes(exchanging, prefill, engine("d", "decode", "other"), port)
    for port in (8000, 7557, 7558, 5557):
        assert not passes(exchanging, prefill, decode, port)


def disaggregated() -> MMRouterDeployment:
    accelerator = to_json(SHORTEST)["spec"]["pools"][0]["accelerator"]
    roles = {"p": "prefill", "d": "decode", "r": "renderer"}
    pools = [{"name": name, "role": role, "accelerator": accelerator} for name, role in roles.items()]
    return change(SHORTEST, pools=pools)


Address = IPv4Address | IPv6Address


def open_to(peers: Iterable[dict[str, Any]], address: Address) -> bool:
    """Whether ``ipBlock`` peers let a connection through, as NetworkPolicy reads them: an IPv4-mapped one is IPv4."""
    address = getattr(address, "ipv4_mapped", None) or address
    return any(
        address in ipaddress.ip_network(peer["ipBlock"]["cidr"])
        and not any(address in ipaddress.ip_network(cidr) for cidr in peer["ipBlock"].get("except", []))
        for peer in peers
    )


BORDERS = """
    169.254.169.254 168.63.129.16 100.100.100.200 100.128.0.1 223.255.255.255
    2001:db8::1 2606:4700::1 64:ff9b::a9fe:a9fe 64:ff9b::808:808 fd00:ec2::254 fe80::1
"""


def agrees_with_the_guard(address: Address) -> bool:
    return open_to(public([]), address) == (refusal(address, ()) is None)


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_public_is_what_the_guard_takes_for_public(address: Address) -> None:
    """But for ISATAP, whose mark is in the middle of an address: no range describes that, the guard looks for it."""
    assume(address.version == 4 or int(address) >> 32 & 0xFFFF_FFFF not in (0x5EFE, 0x0200_5EFE))
    assert agrees_with_the_guard(address)


@pytest.mark.parametrize("address", BORDERS.split())
def test_the_guard_agrees_at_the_borders_of_known_ranges(address: str) -> None:
    assert agrees_with_the_guard(ipaddress.ip_address(address))


def test_the_clusters_own_ranges_are_closed_even_where_they_are_public() -> None:
    peers = public(["10.244.0.0/16", "8.8.8.0/24", "2606:4700::/32", "fd00::/8"])
    assert not open_to(peers, IPv4Address("8.8.8.8"))
    assert not open_to(peers, IPv6Address("64:ff9b::808:808"))
    assert not open_to(peers, IPv6Address("2606:4700::1"))
    assert open_to(peers, IPv4Address("8.8.4.4"))
    assert open_to(peers, IPv6Address("2607::1"))


def test_a_range_that_covers_everything_leaves_no_peer_of_its_kind() -> None:
    """``except`` must lie inside its block, so a block that is all excepted is no block."""
    assert not any(open_to(public(["0.0.0.0/0"]), IPv4Address(address)) for address in ("8.8.8.8", "1.1.1.1"))
    assert public(["0.0.0.0/0", "::/0"]) == []


@pytest.mark.parametrize("address", ["169.254.169.254", "168.63.129.16", "100.100.100.200", "fd00:ec2::254", "fe80::1"])
def test_metadata_services_are_never_open(address: str) -> None:
    where = ipaddress.ip_address(address)
    for peers in (anywhere(), public([]), ranges(["0.0.0.0/0", "::/0"])):
        assert not open_to(peers, where)
        assert open_to(peers, IPv4Address("8.8.8.8"))


def test_allowed_ranges_are_open_whatever_they_are() -> None:
    peers = ranges(["10.1.0.0/16", "::ffff:192.168.0.0/112", "fd12::/16", "169.254.169.254/32"])
    assert [peer["ipBlock"]["cidr"] for peer in peers] == ["10.1.0.0/16", "192.168.0.0/16", "fd12::/16"]


@pytest.mark.parametrize(
    "make", [anywhere, lambda: public(["10.0.0.0/8", "8.8.8.0/24"]), lambda: ranges(["0.0.0.0/0"])]
)
def test_exceptions_lie_strictly_inside_their_block(make: Callable[[], list[dict[str, Any]]]) -> None:
    """The API server refuses any other."""
    for peer in make():
        base = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        for text in peer["ipBlock"]["except"]:
            inner = ipaddress.ip_network(text)
            assert inner.version == base.version
            assert inner.subnet_of(base)  # type: ignore[arg-type]
            assert inner != base


@pytest.mark.parametrize(
    ("endpoint", "peers", "port"),
    [
        ("http://collector.monitoring:4318", None, 4318),
        ("https://otel.example/v1/traces", None, 443),
        ("http://10.0.0.7:4317", [{"ipBlock": {"cidr": "10.0.0.7/32"}}], 4317),
        ("http://[fd00::1]:4317", [{"ipBlock": {"cidr": "fd00::1/128"}}], 4317),
    ],
)
def test_a_collector_is_its_address_or_its_port(endpoint: str, peers: list[Any] | None, port: int) -> None:
    assert collector(endpoint) == (peers, port)


@pytest.mark.parametrize("endpoint", ["http://x:99999", "http://x:0", "http://:4318", "http://[::1:4318", "ftp://x"])
def test_an_endpoint_without_host_or_port_is_an_error_with_its_field(endpoint: str) -> None:
    with pytest.raises(SpecError, match=r"^spec\.observability\.otlpEndpoint: "):
        collector(endpoint)
