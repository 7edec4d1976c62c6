"""Addresses outside the deployment that a NetworkPolicy lets its pods reach, as ``ipBlock`` peers. Pure."""

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network
from typing import Any, Final
from urllib.parse import urlsplit

from mmrouter_lib.api import SpecError

Network = IPv4Network | IPv6Network


def _networks(text: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(item) for item in text.split())


NEVER: Final = _networks(
    "169.254.0.0/16 fe80::/10 "
    # Metadata services that are not link-local: AWS, Google (IPv6), Azure, Alibaba, Oracle. They hand out credentials.
    "fd00:ec2::254/128 fd00:ec2::23/128 fd20:ce::254/128 168.63.129.16/32 100.100.100.200/32 192.0.0.192/32"
)
"""Never reachable: link-local addresses and metadata services."""

NOT_PUBLIC: Final = _networks(
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 "
    "192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 "
    "2001::/23 2001:db8::/32 2002::/16 3fff::/20"
)
"""Private, shared (CGNAT), reserved and tunnelled ranges in :data:`PUBLIC`; the router's own guard refuses them too."""

PUBLIC: Final = _networks("0.0.0.0/0 2000::/3")
"""What can be public at all; of IPv6 nothing else is global unicast."""
EVERYWHERE: Final = _networks("0.0.0.0/0 ::/0")

_NAT64 = IPv6Network("64:ff9b::/96")
_MAPPED = IPv6Network("::ffff:0:0/96")


def anywhere() -> list[dict[str, Any]]:
    """Return peers for every address but :data:`NEVER`."""
    return [peer for base in EVERYWHERE for peer in _block(base, NEVER)]


def public(internal: Iterable[str]) -> list[dict[str, Any]]:
    """Return peers for every public address; ``internal`` are CIDRs of this cluster, public or not, that stay out.

    On clusters that have IPv6 alone a public IPv4 address is reached through NAT64, so those addresses are peers too.
    """
    closed = (*NEVER, *NOT_PUBLIC, *(_network(text) for text in internal))
    translated = [_nat64(network) for network in closed if isinstance(network, IPv4Network)]
    return [*(peer for base in PUBLIC for peer in _block(base, closed)), *_block(_NAT64, translated)]


def ranges(cidrs: Iterable[str]) -> list[dict[str, Any]]:
    """Return peers for these CIDRs, without what of :data:`NEVER` lies inside them."""
    return [peer for text in cidrs for peer in _block(_network(text), NEVER)]


def collector(endpoint: str) -> tuple[list[dict[str, Any]] | None, int]:
    """Return peers (``None``: every peer) and port of an OTLP endpoint. Raises ``SpecError`` for a URL without a port.

    A policy knows no host names: for one, the port is open to everywhere.
    """
    found = host_and_port(endpoint)
    if found is None:
        raise SpecError([("spec.observability.otlpEndpoint", f"{endpoint!r:.80} is no URL with a host and a port")])
    host, port = found
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None, port
    return [{"ipBlock": {"cidr": str(ipaddress.ip_network(address))}}], port


def host_and_port(url: str) -> tuple[str, int] | None:
    """Return where an http(s) URL leads to, ``None`` where it does not say."""
    try:
        parts = urlsplit(url)
        port = parts.port if parts.port is not None else {"http": 80, "https": 443}.get(parts.scheme, 0)
        return (parts.hostname, port) if parts.hostname and port else None
    except ValueError:
        return None


def _block(base: Network, closed: Iterable[Network]) -> list[dict[str, Any]]:
    """Return one peer for ``base`` without ``closed``, or none where nothing of it is left."""
    holes = _holes(base, tuple(closed))
    if holes is None:
        return []
    return [{"ipBlock": {"cidr": str(base), "except": list(holes)} if holes else {"cidr": str(base)}}]


@lru_cache(maxsize=256)  # the same few ranges in every rendering, and a millisecond each
def _holes(base: Network, closed: tuple[Network, ...]) -> tuple[str, ...] | None:
    """Return what ``base`` is without of ``closed``, as few ranges; ``None`` where that is all of it."""
    inside: list[Network] = []
    for network in closed:
        if _within(base, network):
            return None
        if _within(network, base):
            inside.append(network)
    # Of one version all of them, as they lie inside one range.
    return tuple(str(network) for network in ipaddress.collapse_addresses(inside))  # type: ignore[type-var]


def _within(inner: Network, outer: Network) -> bool:
    return inner.version == outer.version and inner.subnet_of(outer)  # type: ignore[arg-type]


def _network(text: str) -> Network:
    """Return the range of a CIDR; an IPv4-mapped one is the IPv4 range in it, as connections have that address."""
    network = ipaddress.ip_network(text, strict=False)
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        return IPv4Network((int(network.network_address) & 0xFFFF_FFFF, network.prefixlen - 96))
    return network


def _nat64(network: IPv4Network) -> IPv6Network:
    return IPv6Network((int(_NAT64.network_address) | int(network.network_address), network.prefixlen + 96))
