"""Guarded GET with redirects: resolve the host, check its addresses, connect to those only, read within limits.

Every hop starts afresh, without cookies, credentials, proxies or reused connections. The fetcher opens the socket
itself, so no unchecked address can be reached even if DNS or the client library returns another one in between.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import Connection

from mmrouter_router.core.errors import is_exhausted
from mmrouter_router.core.fair_slots import FairSlots
from mmrouter_router.media.cache import Fetched, NotModified, Stored, freshness, modification
from mmrouter_router.media.content import MediaError
from mmrouter_router.media.guard import Address, Guard, Target, redirected

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]  # addresses of host and port as text; raises ``OSError``

_HEADERS = {"User-Agent": "mmrouter-media/1", "Accept": "*/*", "Accept-Encoding": "identity"}
MAX_INFORMATIONAL: Final = 8  # answers with status 1xx in front of an origin's answer
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class FetchLimits(NamedTuple):
    """Limits of one fetch, times in seconds. ``max_bytes``: of one answer; ``total_s``: with all redirects."""

    max_bytes: int
    total_s: float = 10.0
    connect_s: float = 3.0
    queue_s: float = 2.0
    redirects: int = 3
    concurrent: int = 16


class Fetcher:
    """Fetches URLs that a guard accepts, at most ``limits.concurrent`` at a time."""

    def __init__(
        self, guard: Guard, limits: FetchLimits, *, lookup: Lookup | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._guard, self._limits = guard, limits
        self._threads = ThreadPoolExecutor(limits.concurrent, "media-lookup")
        self._lookup = lookup
        self._tls: ssl.SSLContext | bool = tls or True
        self._slots, self._lookups = (FairSlots(limits.concurrent, limits.concurrent // 2) for _ in range(2))

    async def fetch(self, url: str, stored: Stored | None = None, tenant: str = "") -> Fetched | NotModified:
        """Return the bytes behind a URL, or that ``stored`` is still valid. Raises ``MediaError``.

        A tenant holds at most half of the slots, so that its silent hosts leave the others some.
        """
        try:
            async with asyncio.timeout(self._limits.queue_s):
                await self._slots.take(tenant)
        except TimeoutError as error:
            raise MediaError("busy", "Too many media URLs are being fetched. Try again.") from error
        try:
            async with asyncio.timeout(self._limits.total_s):
                return await self._follow(url, stored, tenant)
        except TimeoutError as error:
            raise MediaError("timeout", "The media's host did not deliver in time.") from error
        finally:
            self._slots.release(tenant)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, text: str, stored: Stored | None, tenant: str) -> Fetched | NotModified:
        for hop in range(self._limits.redirects + 1):
            target = self._guard.target(text)
            addresses = await self._addresses(target, tenant)
            self._guard.check(target, addresses)
            try:
                answer = await self._get(target, addresses, stored)
            except ssl.SSLError as error:  # also the base of aiohttp's TLS errors
                raise MediaError("unreachable", f"No trusted TLS connection to host '{target.host}'.") from error
            except TimeoutError:
                raise
            except aiohttp.ClientPayloadError as error:
                raise MediaError("unreachable", f"The host '{target.host}' broke off its answer.") from error
            except (aiohttp.ClientError, OSError) as error:
                if is_exhausted(error):
                    raise MediaError("exhausted", str(error)) from error
                raise MediaError("unreachable", f"The host '{target.host}' cannot be reached.") from error
            if not isinstance(answer, str):
                # A redirect is resolved every time, so an answer behind one is never fresh by itself.
                return answer if hop == 0 or answer.fresh_s is None else replace(answer, fresh_s=0.0)
            text = redirected(target, answer)
        raise MediaError("redirect", f"The media's host redirects more than {self._limits.redirects} times.")

    async def _system_lookup(self, host: str, port: int, tenant: str) -> list[str]:
        """Return a host's addresses, looked up in a thread of a pool of its own.

        A thread cannot be ended: a tenant's slot is held until its thread is free, which a silent name server keeps for
        longer than a fetch may take.
        """
        await self._lookups.take(tenant)

        def free(job: "asyncio.Future[Any]") -> None:
            self._lookups.release(tenant)
            if not job.cancelled():
                job.exception()  # that of a lookup for which nothing waits any more is of no interest

        lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        job = asyncio.get_running_loop().run_in_executor(self._threads, lookup)
        job.add_done_callback(free)
        records = await asyncio.shield(job)
        return list(dict.fromkeys(str(where[0]) for *_, where in records))

    async def _addresses(self, target: Target, tenant: str) -> list[Address]:
        if target.literal is not None:
            return [target.literal]
        try:
            if self._lookup is not None:
                addresses = await self._lookup(target.host, target.port)
            else:
                addresses = await self._system_lookup(target.host, target.port, tenant)
            return [ipaddress.ip_address(text) for text in addresses]
        except TimeoutError:
            raise
        except (OSError, UnicodeError) as error:
            if is_exhausted(error):
                raise MediaError("exhausted", str(error)) from error
            raise MediaError("unreachable", f"The host '{target.host}' cannot be resolved.") from error

    async def _get(
        self, target: Target, addresses: Sequence[Address], stored: Stored | None
    ) -> Fetched | NotModified | str:
        # The validators are those of the last URL behind all redirects.
        conditions = stored.conditions() if stored is not None and stored.url == str(target.url) else {}
        connector = aiohttp.TCPConnector(
            resolver=_Pinned(addresses),
            use_dns_cache=False,
            force_close=True,
            limit=1,
            ssl=self._tls,
            socket_factory=socket_factory(addresses),
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                response_class=_Response,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_s),
            ) as session,
            session.get(target.url, headers=_HEADERS | conditions, allow_redirects=False) as answer,
        ):
            if answer.status in _REDIRECTS and "Location" in answer.headers:
                return answer.headers["Location"]
            if answer.status == 304 and conditions:
                return NotModified(freshness(answer.headers) or 0.0)
            return await self._read(target, answer)

    async def _read(self, target: Target, answer: aiohttp.ClientResponse) -> Fetched:
        if answer.status != 200:
            raise MediaError("status", f"The host '{target.host}' answered with status {answer.status}.")
        headers = answer.headers
        if any(coding.strip().lower() != "identity" for coding in headers.getall("Content-Encoding", ())):
            # The decompressed size is unbounded.
            raise MediaError("encoding", f"The host '{target.host}' answered with a compressed body.")
        limit = self._limits.max_bytes
        data = bytearray()
        if (answer.content_length or 0) <= limit:
            async for piece in answer.content.iter_any():
                data += piece
                if len(data) > limit:
                    break
        if (answer.content_length or 0) > limit or len(data) > limit:
            raise MediaError("too_large", f"The media is larger than the limit of {limit} bytes.")
        return Fetched(bytes(data), str(target.url), headers.get("ETag"), modification(headers), freshness(headers))


class _Response(aiohttp.ClientResponse):
    """An answer that follows at most ``MAX_INFORMATIONAL`` answers with status 1xx; aiohttp reads any number."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        protocol, left = connection.protocol, MAX_INFORMATIONAL + 1
        assert protocol is not None
        read = protocol.read

        async def bounded() -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise aiohttp.ClientPayloadError("too many informational answers")
            return await read()

        protocol.read = bounded  # type: ignore[method-assign] # the connection is used for one request only
        return await super().start(connection)


class _Pinned(AbstractResolver):
    def __init__(self, addresses: Iterable[Address]) -> None:
        self._addresses = tuple(addresses)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        pass


def socket_factory(addresses: Iterable[Address]) -> Callable[[Any], socket.socket]:
    """Return a factory of sockets that raises ``PermissionError`` for other addresses, before any handshake."""
    checked = frozenset(addresses)

    def create(info: tuple[Any, Any, int, str, tuple[Any, ...]]) -> socket.socket:
        family, kind, proto, _, where = info
        if ipaddress.ip_address(where[0]) not in checked:
            raise PermissionError("the address was not checked")
        return socket.socket(family, kind, proto)

    return create
