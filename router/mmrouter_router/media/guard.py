"""SSRF guard for media URLs: checks scheme, form, host, port and every address of the host. Pure.

The fetcher connects to the same parsed URL that is checked here. ``allowedHosts`` admits host names (fetch: allowList)
and further ports of them; it does not unlock private addresses. ``allowedCIDRs`` unlocks addresses on any port, and
admits no host.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self
from urllib.parse import urljoin, urlsplit

from yarl import URL

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_router.media.address import Address, Network, covered, networks, refusal
from mmrouter_router.media.types import MediaError

MAX_URL = 8192
"""Characters of an http(s) URL."""

_INSTEAD = " here; send the media as a data: URI."
_DEFAULT_PORTS = {"http": 80, "https": 443}
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.(?!-)[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):")


@dataclass(frozen=True, slots=True)
class Target:
    """A well-formed http(s) URL. ``host`` is lower-case ASCII without a trailing dot, or an address."""

    url: URL
    host: str
    port: int
    literal: Address | None

    @property
    def secure(self) -> bool:
        return self.url.scheme == "https"


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules of ``routing.media`` for fetching."""

    fetch: Literal["dataOnly", "allowList", "public"]
    hosts: frozenset[str]
    suffixes: tuple[str, ...]
    cidrs: tuple[Network, ...]

    @classmethod
    def of(cls, media: MediaSettings) -> Self:
        names = [name.lower().rstrip(".") for name in media.allowed_hosts]
        return cls(
            fetch=media.fetch,
            hosts=frozenset(_canonical(name) for name in names if not name.startswith("*.")),
            suffixes=tuple(name[1:] for name in names if name.startswith("*.")),
            cidrs=networks(media.allowed_cidrs),
        )

    def target(self, text: str) -> Target:
        """Parse a URL and check all but its addresses. Raises ``MediaError``."""
        if self.fetch == "dataOnly":
            raise MediaError("fetch_disabled", "Media URLs are not fetched here; send the media as a data: URI.")
        target = parse(text)
        if self.fetch == "allowList" and not self._named(target.host):
            raise MediaError("host", f"Media is not fetched from host '{target.host}'{_INSTEAD}")
        return target

    def check(self, target: Target, addresses: Sequence[Address]) -> None:
        """Check all addresses of a target's host. Raises ``MediaError`` where one of them is refused.

        A name that is public and private at once is an attack or a mistake.
        """
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
    """Parse an http(s) URL. Raises ``MediaError``.

    Refused: other schemes, white space and control characters, backslashes, credentials, and numbers that only some
    parsers read as an IPv4 address (``0x7f.1``, ``2130706433``).
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
        url = URL(text)
        host, port = url.raw_host, url.port
        named = url.raw_user is not None or url.raw_password is not None or "@" in url.raw_authority
    except ValueError as error:
        raise MediaError("url", "The URL is malformed.") from error
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
    if target.secure and scheme_of(text) == "http":
        raise MediaError("redirect", "The media's host redirects from https to http.")
    return text


def scheme_of(text: str) -> str:
    """Return the lower-case scheme of a URL, empty for none."""
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
