"""SSRF guard for media URLs: checks scheme, form, host, port and every address of the host. Pure.

The fetcher connects to the same parsed URL that is checked here. ``allowedHosts`` admits host names (fetch: allowList)
and further ports of them; it does not unlock private addresses. ``allowedCIDRs`` unlocks addresses on any port, and
admits no host. An IPv4-mapped or NAT64 address is judged as its IPv4 address. A tunnel address (6to4, Teredo, ISATAP,
...) is refused; configuration can unlock it unless its inner address is always refused. Ranges: IANA's special-purpose
registries.
"""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from yarl import URL

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_router.media.content import MediaError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def _networks(**reasons: str) -> tuple[tuple[Network, str], ...]:
    return tuple((ipaddress.ip_network(text), why) for why, texts in reasons.items() for text in texts.split())


_NEVER = _networks(  # regardless of the configuration
    link_local="169.254.0.0/16 fe80::/10",
    # Metadata services that are not link-local: AWS, Google (IPv6), Azure, Alibaba, Oracle.
    metadata=("fd00:ec2::254/128 fd00:ec2::23/128 fd20:ce::254/128 168.63.129.16/32 100.100.100.200/32 192.0.0.192/32"),
    unspecified="0.0.0.0/8 ::/128",
    multicast="224.0.0.0/4 ff00::/8",
    broadcast="255.255.255.255/32",
)

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

    ``allowed`` unlocks addresses that are not public, except those of ``_NEVER`` and tunnels to them.
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


MAX_URL = 8192  # characters of an http(s) URL

_INSTEAD = " here; send the media as a data: URI."
_DEFAULT_PORTS = {"http": 80, "https": 443}
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.(?!-)[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):")


class Target(NamedTuple):
    """A well-formed http(s) URL. ``host`` is lower-case ASCII without a trailing dot, or an address."""

    url: URL
    host: str
    port: int
    literal: Address | None


class Guard:
    """The rules of ``routing.media`` for fetching."""

    def __init__(self, media: MediaSettings) -> None:
        names = [name.lower().rstrip(".") for name in media.allowed_hosts]
        self.fetch = media.fetch
        self.hosts = frozenset(_canonical(name) for name in names if not name.startswith("*."))
        self.suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self.cidrs = networks(media.allowed_cidrs)

    def target(self, text: str) -> Target:
        """Parse a URL and check all but its addresses. Raises ``MediaError``."""
        if self.fetch == "dataOnly":
            raise MediaError("fetch_disabled", "Media URLs are not fetched here; send the media as a data: URI.")
        target = parse(text)
        if self.fetch == "allowList" and not self._named(target.host):
            raise MediaError("host", f"Media is not fetched from host '{target.host}'{_INSTEAD}")
        return target

    def check(self, target: Target, addresses: Sequence[Address]) -> None:
        """Check all addresses of a host: refused ones among them are an attack or a mistake. Raises ``MediaError``."""
        if not addresses:
            raise MediaError("unreachable", f"The host '{target.host}' has no address.")
        if any(refusal(address, self.cidrs) for address in addresses):
            # Naming the address would disclose the internal network.
            raise MediaError("address", f"Media is not fetched from the address of host '{target.host}'{_INSTEAD}")
        usual = target.port == _DEFAULT_PORTS[target.url.scheme] or self._named(target.host)
        if not usual and not all(covered(address, self.cidrs) for address in addresses):
            raise MediaError("port", f"Media is not fetched from port {target.port} of host '{target.host}'{_INSTEAD}")

    def _named(self, host: str) -> bool:
        return host in self.hosts or host.endswith(self.suffixes)


def parse(text: str) -> Target:
    """Parse an http(s) URL. Raises ``MediaError``, also for credentials, white space, control characters, backslashes,
    and numbers that only some parsers read as an IPv4 address (``0x7f.1``, ``2130706433``).
    """
    scheme = scheme_of(text)
    if scheme not in _DEFAULT_PORTS:
        shown = f"'{scheme}:'" if scheme else "no scheme"
        raise MediaError("scheme", f"Media URLs begin with https:, http: or data:, this one has {shown}.")
    if len(text) > MAX_URL:
        raise MediaError("url", f"The URL is longer than {MAX_URL} characters.")
    if _FORBIDDEN.search(text):
        raise MediaError("url", "The URL holds white space, a control character or a backslash.")
    try:
        return _target(text)
    except (ValueError, IndexError) as error:  # yarl raises the latter for a host of one bracket
        raise MediaError("url", "The URL is malformed.") from error


def _target(text: str) -> Target:
    """Raises ``MediaError`` for a URL that is not served, ``ValueError`` for one that is malformed."""
    url = URL(text)
    host, port = url.raw_host, url.port
    named = url.raw_user is not None or url.raw_password is not None or "@" in url.raw_authority
    if not host or not port:
        raise MediaError("url", "The URL names no host or no port.")
    if named or "@" in urlsplit(text).netloc:
        raise MediaError("url", "The URL holds a user name or password.")
    host = host.lower().removesuffix(".")
    literal = None if "%" in host else _literal(host)
    if literal is None and not (_HOST.fullmatch(host) and len(host) <= 253):
        raise MediaError("url", "The URL's host is neither a name nor an address.")
    if literal is None and _NUMBER.fullmatch(host.rpartition(".")[2]):
        raise MediaError("url", "The URL's host is a number that is no address; write an address as 192.0.2.1.")
    host = str(literal) if literal is not None else host
    return Target(_verbatim(url.with_host(host), text), host, port, literal)


def redirected(target: Target, location: str) -> str:
    """Return the absolute, unchecked URL of a redirect. Raises ``MediaError``."""
    try:
        text = urljoin(str(target.url), location)
    except ValueError as error:
        raise MediaError("redirect", "The media's host redirects to a malformed URL.") from error
    if target.url.scheme == "https" and scheme_of(text) == "http":
        raise MediaError("redirect", "The media's host redirects from https to http.")
    return text


def scheme_of(text: str) -> str:
    match = _SCHEME.match(text)
    return match[1].lower() if match else ""


def _verbatim(url: URL, text: str) -> URL:
    """Return the URL without its fragment; keep the spelling of path and query, which URL signatures cover."""
    if not text.isascii():
        return url.with_fragment(None)
    parts = urlsplit(text)
    query = f"?{parts.query}" if parts.query else ""
    return URL(f"{url.scheme}://{url.raw_authority}{parts.path or '/'}{query}", encoded=True)


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _canonical(name: str) -> str:
    literal = _literal(name.strip("[]"))
    return str(literal) if literal is not None else name
