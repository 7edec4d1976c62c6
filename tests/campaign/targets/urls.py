"""URLs of media under the guard's policy, and headers of their origins.

A URL that the guard accepts names one host and port to every parser: to the guard, to ``urllib`` and to httptools. Its
addresses are public unless the policy unlocks them, by a table that does not use the guard's.
"""

import ipaddress
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import httptools
from campaign.mutation import mutated
from campaign.target import BrokenPropertyError, Target
from multidict import CIMultiDict

from mmrouter_lib.api import Media
from mmrouter_router.media.cache import MAX_FRESH_S, freshness, modification
from mmrouter_router.media.content import MediaError
from mmrouter_router.media.guard import Guard, redirected

POLICIES = {
    b"public": Guard(Media(fetch="public")),
    b"list": Guard(Media(fetch="allowList", allowed_hosts=["a.example", "*.cdn.example", "127.0.0.1"])),
    b"unlocked": Guard(Media(fetch="public", allowed_hosts=["10.0.0.1"], allowedCIDRs=["10.0.0.0/8", "fd00::/8"])),
}
URLS = r"""
http://a.example/ https://a.example:443/x?y#z http://user:pass@a.example/ http://93.184.216.34:8080/
http://127.0.0.1/ http://[::1]:80/ http://[::ffff:10.0.0.1]/ http://[64:ff9b::7f00:1]/ http://[2002:7f00:1::]/
http://[2001:0:7f00:1::1]/ http://0x7f.1/ http://0177.0.0.1/ http://2130706433/ http://127.1/
http://169.254.169.254/latest http://[fe80::1%25eth0]/ http://a.example.:80/ http://x.cdn.example/
http://xn--bcher-kva.example/ http://%61.example/ http://10.0.0.1/ http://[fd00::1]/
http://a.example\@b.example/ http://a.example#@b.example/ http://a.example?@b.example/ //a.example/
http:a.example
"""
HEADERS = (
    b"Cache-Control: max-age=60, s-maxage=5",
    b"Expires: Wed, 21 Oct 2015 07:28:00 GMT\nDate: Wed, 21 Oct 2015 07:00:00 GMT\nAge: 3",
    b"Location: //b.example/x\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\nDate: Wed, 21 Oct 2015 07:29:00 GMT",
    b'Cache-Control: no-cache, private="x", no-store\nVary: *',
)


class Urls(Target):
    """An input: a line with the policy, a line with the URL, then headers of its origin's answer."""

    name = "urls"
    short = 1500
    words = (
        *b"http:// https:// HTTP: : / // ? # @ [ ] % %00 %2e %40 \\ . .. :80 :0 :65536 :-1 127.0.0.1 0x7f.1".split(),
        *b"::1 localhost [::ffff:7f00:1] ::ffff: ffff::/ 64:ff9b:: 2002: fe80::1%25eth0 xn-- \xc2\xad".split(),
        *b"max-age= s-maxage=9999999999 no-cache Expires: Date: Age: -1 Location: Vary: 99999 0000 +9959 GMT".split(),
        *(
            " \t\u3002\uff0e\uff11\u2024\u2488\u00df\u0130\u200d\ud7ff".encode(),
            b"\xef\xbc\x8f",
            b"\xe2\x84\x80",
            b"\0",
        ),
    )

    def seeds(self) -> list[bytes]:
        return [
            policy + b"\n" + url.encode() + b"\n" + HEADERS[number % len(HEADERS)]
            for policy in POLICIES
            for number, url in enumerate(URLS.split())
        ]

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        policy, _, rest = source.choice(kept).partition(b"\n")
        return policy + b"\n" + mutated(source, (rest, source.choice(kept).partition(b"\n")[2]), self.words)

    def check(self, data: bytes) -> str:
        policy, url, headers = [*data.split(b"\n", 2), b"", b""][:3]
        guard = POLICIES.get(policy)
        if guard is None:
            return "no policy"
        answer = CIMultiDict[str]()
        for line in headers.decode("latin-1").split("\n"):
            name, _, value = line.partition(":")
            answer.add(name.strip(), value.strip())
        with self.product():
            fresh = freshness(answer)
            modification(answer)
        if fresh is not None and not 0 <= fresh <= MAX_FRESH_S:
            raise BrokenPropertyError(f"fresh for {fresh} s")
        text = url.decode("utf-8", "replace")
        outcome = self._judge(guard, text)
        if outcome.startswith("accepted") and "Location" in answer:
            with suppress(MediaError), self.product():
                target = guard.target(text)
                outcome += ", redirected: " + self._judge(guard, redirected(target, answer["Location"]))
        return outcome

    def _judge(self, guard: Guard, text: str) -> str:
        """Return the guard's decision on a URL whose host, where it is a name, resolves to a public address."""
        try:
            with self.product():
                target = guard.target(text)
                address = target.literal or ipaddress.ip_address("93.184.216.34")
                guard.check(target, [address])
        except MediaError as error:
            return error.reason
        sent = str(target.url)
        split = urlsplit(sent)
        default = 443 if split.scheme == "https" else 80
        hosts, ports = {target.host, (split.hostname or "").rstrip(".")}, {target.port, split.port or default}
        with suppress(httptools.HttpParserInvalidURLError):  # it knows no underscore in a name
            parsed = httptools.parse_url(sent.encode())
            hosts.add(parsed.host.decode().strip("[]"))
            ports.add(parsed.port or default)
            if parsed.userinfo:
                raise BrokenPropertyError(f"{sent!r} has credentials")
        if len(hosts) > 1 or len(ports) > 1:
            raise BrokenPropertyError(f"{sent!r} names {hosts}, {ports}")
        if split.username is not None:
            raise BrokenPropertyError(f"{sent!r} has credentials")
        if not sent.isascii() or any(ord(character) <= 32 for character in sent):
            raise BrokenPropertyError(f"{sent!r} is not sent as it is")
        if guard.fetch == "allowList" and not _listed(target.host):
            raise BrokenPropertyError(f"{target.host} is not on the list")
        with suppress(OSError):  # what the C library would connect to, where it reads the host as an address
            numeric = socket.getaddrinfo(target.host, 80, flags=socket.AI_NUMERICHOST)
            for *_, where in numeric:
                real = ipaddress.ip_address(str(where[0]).partition("%")[0])
                if not _open(real, guard):
                    raise BrokenPropertyError(f"{sent!r} reaches {real}")
        return "accepted " + ("address" if target.literal else "name")


def _listed(host: str) -> bool:
    return host in ("a.example", "127.0.0.1") or host.endswith(".cdn.example")


def _open(address: ipaddress.IPv4Address | ipaddress.IPv6Address, guard: Guard) -> bool:
    """Whether a policy may reach an address, by Python's own tables; an address within an address counts."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped
        if inner is None and address in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return _open(inner, guard)
    unlocked = any(address in network for network in guard.cidrs if network.version == address.version)
    return (address.is_global and not address.is_multicast) or unlocked
