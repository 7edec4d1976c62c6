import ipaddress
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrouter_router.media.address import covered, networks, refusal

EVERYTHING = networks(["0.0.0.0/0", "::/0"])

ADDRESSES = {
    "127.0.0.1": "loopback",
    "127.255.255.254": "loopback",
    "::1": "loopback",
    "10.1.2.3": "private",
    "172.31.255.255": "private",
    "192.168.0.1": "private",
    "fd12:3456::1": "private",
    "fec0::1": "private",
    "100.64.0.1": "shared",
    "169.254.169.254": "link_local",
    "169.254.1.1": "link_local",
    "fe80::1": "link_local",
    "fe80::1%eth0": "link_local",
    "fd00:ec2::254": "metadata",
    "fd20:ce::254": "metadata",
    "168.63.129.16": "metadata",
    "100.100.100.200": "metadata",
    "0.0.0.0": "unspecified",
    "0.1.2.3": "unspecified",
    "::": "unspecified",
    "224.0.0.1": "multicast",
    "ff02::1": "multicast",
    "255.255.255.255": "broadcast",
    "240.0.0.1": "reserved",
    "192.0.0.8": "reserved",
    "192.0.2.1": "documentation",
    "2001:db8::1": "documentation",
    "3fff::1": "documentation",
    "198.18.0.1": "benchmark",
    "2001:10::1": "reserved",
    "4000::1": "reserved",
    "::ffff:127.0.0.1": "loopback",
    "::ffff:169.254.169.254": "link_local",
    "64:ff9b::10.0.0.1": "private",
    "64:ff9b::169.254.169.254": "link_local",
    "64:ff9b:1::10.0.0.1": "tunnel",
    "::127.0.0.1": "tunnel",
    "::ffff:0:127.0.0.1": "tunnel",
    "2002:7f00:1::": "tunnel",
    "2002:a9fe:a9fe::1": "link_local",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2": "tunnel",
    "2001:0:4136:e378:8000:63bf:5601:5601": "link_local",
    "2a00:1450::5efe:7f00:1": "tunnel",
    "2a00:1450::200:5efe:a9fe:a9fe": "link_local",
    "8.8.8.8": None,
    "::ffff:8.8.8.8": None,
    "64:ff9b::8.8.8.8": None,
    "2a00:1450:4001:830::200e": None,
}
"""Reason for which each address is refused without allowed ranges."""


@pytest.mark.parametrize("text", ADDRESSES)
def test_non_public_addresses_are_refused_by_kind(text):
    assert refusal(ipaddress.ip_address(text), ()) == ADDRESSES[text]


@pytest.mark.parametrize("text", ADDRESSES)
def test_no_range_unlocks_link_local_and_metadata_addresses(text):
    never = {"link_local", "metadata", "unspecified", "multicast", "broadcast"}
    expected = ADDRESSES[text] if ADDRESSES[text] in never else None
    assert refusal(ipaddress.ip_address(text), EVERYTHING) == expected


def test_range_unlocks_its_addresses_in_every_notation():
    allowed = networks(["10.0.0.0/8"])
    for text in ("10.0.0.1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1"):
        assert refusal(ipaddress.ip_address(text), allowed) is None
        assert covered(ipaddress.ip_address(text), allowed)
    for text in ("11.0.0.1", "192.168.0.1", "::ffff:192.168.0.1", "2002:a00:1::", "::10.0.0.1"):
        assert not covered(ipaddress.ip_address(text), allowed)
    assert refusal(IPv4Address("192.168.0.1"), allowed) == "private"
    assert refusal(IPv6Address("2002:a00:1::"), allowed) == "tunnel"


def test_mapped_range_is_its_ipv4_range():
    assert networks(["::ffff:10.0.0.0/104", "10.1.2.3/8"]) == (ipaddress.ip_network("10.0.0.0/8"),) * 2


@settings(max_examples=150, deadline=None)
@given(st.ip_addresses())
def test_accepted_addresses_are_global_for_ipaddress(address):
    if refusal(address, ()) is None:
        inner = IPv4Address(int(address) & 0xFFFFFFFF) if address in ipaddress.ip_network("64:ff9b::/96") else address
        inner = getattr(inner, "ipv4_mapped", None) or inner
        assert inner.is_global
        for trait in ("is_private", "is_loopback", "is_link_local", "is_multicast", "is_reserved", "is_unspecified"):
            assert not getattr(inner, trait), trait


@settings(max_examples=150, deadline=None)
@given(st.ip_addresses(v=4))
def test_embedded_address_is_judged_as_itself(address):
    number = int(address)
    for wrapped in (IPv6Address(0xFFFF << 32 | number), IPv6Address(0x64FF9B << 96 | number)):
        assert refusal(wrapped, ()) == refusal(address, ())
        assert refusal(wrapped, EVERYTHING) == refusal(address, EVERYTHING)
    tunnels = [
        IPv6Address(0x2002 << 112 | number << 80 | 1),
        IPv6Address(0x20010000 << 96 | 0x08080808 << 64 | number ^ 0xFFFFFFFF),
        IPv6Address(0x2A001450 << 96 | 0x5EFE << 32 | number),
        IPv6Address(0xFFFF << 48 | number),
    ]
    for tunnel in tunnels:
        assert refusal(tunnel, ()) is not None
        assert refusal(tunnel, EVERYTHING) == refusal(address, EVERYTHING)
