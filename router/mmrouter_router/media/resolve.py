"""URLs of a request -> bytes: ``data:`` URIs, guarded fetches, one flight per URL, a cache.

A flight has time limits of its own. What it brings is shared by all who waited, so one URL is one set of bytes to them.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_lib.api import quantity_bytes
from mmrouter_router.core.single_flight import Flights
from mmrouter_router.intake.request import ImagePart
from mmrouter_router.intake.splice import Inline
from mmrouter_router.media import datauri, sniff
from mmrouter_router.media.cache import Key, MediaCache, Stored
from mmrouter_router.media.fetch import Fetcher, FetchLimits, Lookup, NotModified
from mmrouter_router.media.guard import Guard
from mmrouter_router.media.types import Media, MediaError, MediaMetrics
from mmrouter_router.telemetry.tracing import stage

CACHE_BYTES = 256 * 1024**2
PARALLEL = 4
"""Fetches of one request at a time: one request must not take all slots."""


class Part(Protocol):
    """What resolving needs of an image or another medium of a request."""

    @property
    def url(self) -> str:
        """The URL as the client wrote it."""

    @property
    def param(self) -> str:
        """The field that errors name."""


class MediaResolver:
    """Everything of ``routing.media`` in one process. Create it inside the running loop or before; use it inside."""

    def __init__(
        self,
        media: MediaSettings,
        *,
        registry: CollectorRegistry,
        limits: FetchLimits | None = None,
        cache_bytes: int = CACHE_BYTES,
        lookup: Lookup | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = quantity_bytes(media.max_bytes)
        self._max_request_bytes = quantity_bytes(media.max_request_bytes)
        self._guard = Guard.of(media)
        self._fetcher = Fetcher(self._guard, limits or FetchLimits(self._max_bytes), lookup=lookup, tls=tls)
        self._cache = MediaCache(cache_bytes)
        self._flights = Flights[Key, Media]()
        self._metrics = MediaMetrics(registry)
        self._clock = clock

    async def resolve(
        self, url: str, *, param: str, tenant: str = "", deadline: float | None = None, taken: Inline | None = None
    ) -> Media:
        """Return the bytes of one URL. ``deadline`` is a time of the running loop; ``taken``: they are known already.

        Raises ``RequestError`` (400 with code ``media_...`` naming ``param``; 429 where only we are too busy).
        """
        try:
            media = self._known(taken) if taken is not None else await self._resolve(url, tenant, deadline)
        except MediaError as error:
            self._metrics.refused.labels(error.reason).inc()
            raise error.for_field(param) from error
        self._metrics.resolved.labels(media.source).inc()
        self._metrics.bytes.labels(media.source).inc(len(media.data))
        return media

    async def resolve_all(
        self, parts: Sequence[Part], *, tenant: str = "", deadline: float | None = None
    ) -> list[Media]:
        """Return the bytes of all parts, in order; together they are held to the request's limit.

        The first fault ends all fetches of the request. A URL that stands in it twice is fetched once.
        """
        budget = _Budget(self._max_request_bytes)
        found: dict[int, Media] = {}
        places: dict[str, list[int]] = {}
        # Inline media first: their faults cost nobody a fetch.
        for place, part in enumerate(parts):
            if _is_data(part.url):
                taken = part.taken if isinstance(part, ImagePart) else None
                found[place] = await self.resolve(part.url, param=part.param, taken=taken)
                self._charge(budget, part, found[place])
            else:
                places.setdefault(part.url, []).append(place)
        slots = asyncio.Semaphore(PARALLEL)

        async def fetch(same: list[int]) -> None:
            first = parts[same[0]]
            async with slots:
                with stage("fetch image") as told:
                    media = await self.resolve(first.url, param=first.param, tenant=tenant, deadline=deadline)
                    if told:
                        told.tell({"mmrouter.media.source": media.source, "mmrouter.media.bytes": len(media.data)})
            for place in same:
                self._charge(budget, parts[place], media)
                found[place] = media

        try:
            async with asyncio.TaskGroup() as group:
                for same in places.values():
                    group.create_task(fetch(same))
        except BaseExceptionGroup as faults:
            raise faults.exceptions[0] from None
        return [found[place] for place in range(len(parts))]

    async def close(self) -> None:
        """End all fetches."""
        await self._flights.close()
        self._fetcher.close()

    def _charge(self, budget: "_Budget", part: Part, media: Media) -> None:
        budget.left -= len(media.data)
        if budget.left < 0:
            self._metrics.refused.labels("request_too_large").inc()
            sentence = f"The media of the request are larger than {self._max_request_bytes} bytes together."
            raise MediaError("request_too_large", sentence).for_field(part.param)

    def _known(self, inline: Inline) -> Media:
        datauri.bound(len(inline.data), self._max_bytes)
        return Media(inline.data, sniff.mime(inline.data), "data", inline.text)

    async def _resolve(self, url: str, tenant: str, deadline: float | None) -> Media:
        if _is_data(url):
            data = datauri.decode(url, self._max_bytes)
            return Media(data, sniff.mime(data), "data")
        self._guard.target(url)  # refuse what needs no network before anything is started
        key = (tenant, url)
        stored = self._cache.get(key)
        if stored is not None and stored.fresh_until > self._clock():
            return Media(stored.data, stored.mime, "cache")
        if key in self._flights:
            self._metrics.joined.inc()
        try:
            async with asyncio.timeout_at(deadline):
                return await self._flights.join(key, lambda: self._fly(key))
        except TimeoutError as error:
            raise MediaError("timeout", "The media's host did not deliver in time.") from error

    async def _fly(self, key: Key) -> Media:
        stored = self._cache.get(key)
        with self._metrics.fetching.track_inprogress(), self._metrics.fetch_seconds.time():
            answer = await self._fetcher.fetch(key[1], stored)
        if isinstance(answer, NotModified):
            assert stored is not None
            self._cache.renew(key, self._clock() + answer.fresh_s)
            return Media(stored.data, stored.mime, "revalidated")
        if not answer.data:
            raise MediaError("empty", "The media's host answered with an empty body.")
        if sniff.is_page(answer.data):
            raise MediaError("web_page", "The media's host answered with a web page.")
        mime = sniff.mime(answer.data)
        if answer.fresh_s is not None and (answer.fresh_s or answer.etag or answer.modified):
            fresh_until = self._clock() + answer.fresh_s
            entry = Stored(answer.data, mime, answer.url, answer.etag, answer.modified, fresh_until)
            self._cache.put(key, entry)
        else:
            self._cache.drop(key)
        self._metrics.cache_bytes.set(self._cache.size)
        return Media(answer.data, mime, "fetch")


@dataclass
class _Budget:
    left: int


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"
