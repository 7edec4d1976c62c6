"""Addresses that policies open: what the router's own guard refuses, the network refuses as well."""

import ipaddress
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from mmrouter_lib.api import SpecError
from mmrouter_operator.render.destinations import anywhere, collector, public, ranges
from mmrouter_router.media.address import refusal

Address = IPv4Address | IPv6Address


def open_to(peers: Iterable[dict[str, Any]], address: Address) -> bool:
    """Whether ``ipBlock`` peers let a connection through, as NetworkPolicy reads them: an IPv4-mapped one is IPv4."""
    address = getattr(address, "ipv4_mapped", None) or address
    for peer in peers:
        block = peer["ipBlock"]
        if address in ipaddress.ip_network(block["cidr"]) and not any(
            address in ipaddress.ip_network(cidr) for cidr in block.get("except", [])
        ):
            return True
    return False


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
@example(IPv4Address("169.254.169.254"))
@example(IPv4Address("168.63.129.16"))
@example(IPv4Address("100.100.100.200"))
@example(IPv4Address("100.128.0.1"))
@example(IPv4Address("223.255.255.255"))
@example(IPv6Address("2001:db8::1"))
@example(IPv6Address("2606:4700::1"))
@example(IPv6Address("64:ff9b::a9fe:a9fe"))
@example(IPv6Address("64:ff9b::808:808"))
@example(IPv6Address("fd00:ec2::254"))
@example(IPv6Address("fe80::1"))
def test_public_is_what_the_guard_takes_for_public(address: Address) -> None:
    """But for ISATAP, whose mark is in the middle of an address: no range describes that, the guard looks for it."""
    assume(address.version == 4 or int(address) >> 32 & 0xFFFF_FFFF not in (0x5EFE, 0x0200_5EFE))
    assert open_to(public([]), address) == (refusal(address, ()) is None)


@given(st.ip_addresses(v=4))
def test_every_ipv4_address_is_judged_as_the_guard_does(address: IPv4Address) -> None:
    assert open_to(public([]), address) == (refusal(address, ()) is None)


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
