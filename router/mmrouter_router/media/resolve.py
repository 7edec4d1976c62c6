"""Resolves media URLs to bytes: ``data:`` URIs, guarded fetches (shared by concurrent requests), a cache."""

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_lib.api import quantity_bytes
from mmrouter_router.core.single_flight import SingleFlight
from mmrouter_router.core.worker_threads import WorkerThreads
from mmrouter_router.intake.request import ImagePart, InlineImage, MediaPart
from mmrouter_router.media import content
from mmrouter_router.media.cache import Key, MediaCache, NotModified, Stored
from mmrouter_router.media.content import Media, MediaError
from mmrouter_router.media.guard import Guard
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.tracing import child_span

if TYPE_CHECKING:
    from mmrouter_router.media.fetch import Fetcher, FetchLimits, Lookup

CACHE_BYTES = 256 * 1024**2
PARALLEL = 4  # concurrent fetches of one request, so that it cannot occupy all slots
Part = ImagePart | MediaPart


class MediaResolver:
    """Resolves media as ``routing.media`` says. May be created before the event loop runs."""

    def __init__(
        self,
        media: MediaSettings,
        *,
        metrics: Metrics,
        limits: "FetchLimits | None" = None,
        threads: WorkerThreads | None = None,
        cache_bytes: int = CACHE_BYTES,
        lookup: "Lookup | None" = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = quantity_bytes(media.max_bytes)
        self._max_request_bytes = quantity_bytes(media.max_request_bytes)
        self._guard = Guard(media)
        self._fetcher: Fetcher | None = None  # without one the guard refuses every URL
        if media.fetch != "dataOnly":
            # Imported here because aiohttp is a large part of the router's start.
            from mmrouter_router.media import fetch  # noqa: PLC0415

            limits = limits or fetch.FetchLimits(self._max_bytes)
            self._fetcher = fetch.Fetcher(self._guard, limits, lookup=lookup, tls=tls)
        self._cache = MediaCache(cache_bytes)
        self._fetches = SingleFlight[Key, Media]()
        self._threads = threads or WorkerThreads()
        self._metrics, self._clock = metrics, clock

    async def resolve(self, url: str, *, param: str, tenant: str = "", inline: InlineImage | None = None) -> Media:
        """Return the bytes of one URL. Raises ``RequestError`` (400; 429 where all fetch slots are busy)."""
        try:
            media = await self._resolve(url, tenant, inline)
        except MediaError as error:
            self._metrics.media_refused.labels(error.reason).inc()
            raise error.for_field(param) from error
        self._metrics.media_resolved.labels(media.source).inc()
        self._metrics.media_bytes.labels(media.source).inc(len(media.data))
        return media

    async def resolve_all(self, parts: Sequence[Part], *, tenant: str = "") -> list[Media]:
        """Return the bytes of all parts, in order; fetch each URL once. The first error cancels all, and is raised."""
        left = self._max_request_bytes
        resolved: dict[int, Media] = {}
        places: dict[str, list[int]] = {}

        def charge(part: Part, media: Media) -> None:
            nonlocal left
            left -= len(media.data)
            if left < 0:
                self._metrics.media_refused.labels("request_too_large").inc()
                sentence = f"The media of the request are larger than {self._max_request_bytes} bytes together."
                raise MediaError("request_too_large", sentence).for_field(part.param)

        # InlineImage media first: their errors must not cost a fetch.
        for place, part in enumerate(parts):
            if _is_data(part.url):
                resolved[place] = await self.resolve(part.url, param=part.param, tenant=tenant, inline=part.inline)
                charge(part, resolved[place])
            else:
                places.setdefault(part.url, []).append(place)
        slots = asyncio.Semaphore(PARALLEL)

        async def fetch(same: list[int]) -> None:
            first = parts[same[0]]
            async with slots:
                with child_span("fetch image") as span:
                    media = await self.resolve(first.url, param=first.param, tenant=tenant)
                    if span:
                        size = len(media.data)
                        span.set_attributes({"mmrouter.media.source": media.source, "mmrouter.media.bytes": size})
            for place in same:
                charge(parts[place], media)
                resolved[place] = media

        try:
            async with asyncio.TaskGroup() as group:
                for same in places.values():
                    group.create_task(fetch(same))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [resolved[place] for place in range(len(parts))]

    async def close(self) -> None:
        await self._fetches.close()
        if self._fetcher is not None:
            self._fetcher.close()

    async def _resolve(self, url: str, tenant: str, inline: InlineImage | None) -> Media:
        if inline is not None:
            content.bound(len(inline.data), self._max_bytes)
            return Media(inline.data, content.detect(inline.data), "data", inline.text)
        if _is_data(url):
            data = await self._threads.run(tenant, len(url), content.decode, url, self._max_bytes)
            return Media(data, content.detect(data), "data")
        self._guard.target(url)  # refuse before any network access
        key = (tenant, url)
        stored = self._cache.get(key)
        if stored is not None and stored.fresh_until > self._clock():
            return Media(stored.data, stored.mime, "cache")
        if key in self._fetches:
            self._metrics.media_joined.inc()
        return await self._fetches.run(key, lambda: self._fetch(key))

    async def _fetch(self, key: Key) -> Media:
        assert self._fetcher is not None
        stored = self._cache.get(key)
        with self._metrics.media_fetching.track_inprogress(), self._metrics.media_fetch_seconds.time():
            answer = await self._fetcher.fetch(key[1], stored, key[0])
        if isinstance(answer, NotModified):
            assert stored is not None
            self._cache.renew(key, self._clock() + answer.fresh_s)
            return Media(stored.data, stored.mime, "revalidated")
        if not answer.data:
            raise MediaError("empty", "The media's host answered with an empty body.")
        if content.is_page(answer.data):
            raise MediaError("web_page", "The media's host answered with a web page.")
        mime = content.detect(answer.data)
        if answer.fresh_s is not None and (answer.fresh_s or answer.etag or answer.modified):
            until = self._clock() + answer.fresh_s
            self._cache.put(key, Stored(answer.data, mime, answer.url, answer.etag, answer.modified, until))
        else:
            self._cache.drop(key)
        self._metrics.media_cache_bytes.set(self._cache.size)
        return Media(answer.data, mime, "fetch")


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"
