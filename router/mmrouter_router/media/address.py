"""IP address rules of the SSRF guard: which addresses may be connected to. Pure; refuses what no rule allows.

An IPv4-mapped or NAT64 address is judged as its IPv4 address. A tunnel address (6to4, Teredo, ISATAP, ...) is refused;
configuration can unlock it unless its inner address is always refused. Ranges: IANA's special-purpose registries.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def _networks(**reasons: str) -> tuple[tuple[Network, str], ...]:
    return tuple((ipaddress.ip_network(text), why) for why, texts in reasons.items() for text in texts.split())


_NEVER = _networks(
    link_local="169.254.0.0/16 fe80::/10",
    # Metadata services that are not link-local: AWS, Google (IPv6), Azure, Alibaba, Oracle.
    metadata=("fd00:ec2::254/128 fd00:ec2::23/128 fd20:ce::254/128 168.63.129.16/32 100.100.100.200/32 192.0.0.192/32"),
    unspecified="0.0.0.0/8 ::/128",
    multicast="224.0.0.0/4 ff00::/8",
    broadcast="255.255.255.255/32",
)
"""Refused regardless of the configuration."""

_UNLESS_ALLOWED = _networks(
    loopback="127.0.0.0/8 ::1/128",
    private="10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 fc00::/7 fec0::/10",
    shared="100.64.0.0/10",
    documentation="192.0.2.0/24 198.51.100.0/24 203.0.113.0/24 2001:db8::/32 3fff::/20",
    benchmark="198.18.0.0/15 2001:2::/48",
    reserved="192.0.0.0/24 192.88.99.0/24 240.0.0.0/4 2001::/23",
)
_TUNNELS = _networks(tunnel="2002::/16 2001::/32 ::/96 ::ffff:0:0:0/96 64:ff9b:1::/48")
_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_GLOBAL_V6 = IPv6Network("2000::/3")
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


def refusal(address: Address, allowed: Sequence[Network]) -> str | None:
    """Return why an address is refused, ``None`` where it may be connected to.

    ``allowed`` unlocks addresses that are not public, except link-local, metadata, unspecified, multicast and broadcast
    addresses and tunnels to them.
    """
    carried, tunnel = _carried(address)
    for inner in carried:
        if why := _within(inner, _NEVER):
            return why
    if covered(address, allowed):
        return None
    plain = address if tunnel else carried[-1]
    if tunnel:
        return "tunnel"
    if why := _within(plain, _UNLESS_ALLOWED):
        return why
    if isinstance(plain, IPv6Address) and plain not in _GLOBAL_V6:
        return "reserved"
    # ipaddress may know reserved ranges that are newer than the tables above.
    return None if plain.is_global else "reserved"


def covered(address: Address, ranges: Sequence[Network]) -> bool:
    """Return whether an address is in one of the ranges; an IPv4-mapped or NAT64 address counts as its inner one."""
    carried, tunnel = _carried(address)
    plain = address if tunnel else carried[-1]
    return any(plain in network for network in ranges if network.version == plain.version)


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Parse ranges in CIDR notation; an IPv4-mapped range becomes its IPv4 range. Raises ``ValueError``."""
    ranges: list[Network] = []
    for text in texts:
        network = ipaddress.ip_network(text, strict=False)
        if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
            inner = IPv4Address(int(network.network_address) & 0xFFFF_FFFF)
            network = IPv4Network((inner, network.prefixlen - 96))
        ranges.append(network)
    return tuple(ranges)


def _carried(address: Address) -> tuple[list[Address], bool]:
    """Return the address and those embedded in it, innermost last, and whether it is a tunnel address."""
    if isinstance(address, IPv4Address):
        return [address], False
    low = IPv4Address(int(address) & 0xFFFF_FFFF)
    if address in _MAPPED or address in _NAT64:
        return [address, low], False
    if address.sixtofour is not None:
        return [address, address.sixtofour], True
    if address.teredo is not None:
        return [address, *address.teredo], True
    if int(address) >> 32 & 0xFFFF_FFFF in _ISATAP:
        return [address, low], True
    if address not in (IPv6Address(0), IPv6Address(1)) and _within(address, _TUNNELS):
        return [address, low], True
    return [address], False


def _within(address: Address, table: Sequence[tuple[Network, str]]) -> str | None:
    return next((why for network, why in table if network.version == address.version and address in network), None)
