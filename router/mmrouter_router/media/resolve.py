"""Resolves the media URLs of a request to bytes: ``data:`` URIs, guarded fetches, a cache.

Concurrent requests for one URL share one fetch, whose time limits are its own, and so get the same bytes.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_lib.api import quantity_bytes
from mmrouter_router.core.single_flight import SingleFlight
from mmrouter_router.intake.inline_images import InlineImage
from mmrouter_router.intake.request import ImagePart
from mmrouter_router.media import data_uri, mime_type
from mmrouter_router.media.cache import Key, MediaCache, Stored
from mmrouter_router.media.fetch import Fetcher, FetchLimits, Lookup, NotModified
from mmrouter_router.media.guard import Guard
from mmrouter_router.media.types import Media, MediaError
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.tracing import child_span

CACHE_BYTES = 256 * 1024**2
PARALLEL = 4
"""Concurrent fetches of one request, so that it cannot occupy all slots."""


class Part(Protocol):
    """A medium of a request: its URL as the client wrote it, and the field that errors name."""

    @property
    def url(self) -> str: ...

    @property
    def param(self) -> str: ...


class MediaResolver:
    """Resolves media as ``routing.media`` says. May be created before the event loop runs."""

    def __init__(
        self,
        media: MediaSettings,
        *,
        metrics: Metrics,
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
        self._fetches = SingleFlight[Key, Media]()
        self._metrics = metrics
        self._clock = clock

    async def resolve(
        self,
        url: str,
        *,
        param: str,
        tenant: str = "",
        deadline: float | None = None,
        inline: InlineImage | None = None,
    ) -> Media:
        """Return the bytes of one URL. ``deadline``: a time of the event loop; ``inline``: the bytes from the body.

        Raises ``RequestError`` (400 with code ``media_...`` naming ``param``; 429 where all fetch slots are busy).
        """
        try:
            media = self._from_inline(inline) if inline is not None else await self._resolve(url, tenant, deadline)
        except MediaError as error:
            self._metrics.media_refused.labels(error.reason).inc()
            raise error.for_field(param) from error
        self._metrics.media_resolved.labels(media.source).inc()
        self._metrics.media_bytes.labels(media.source).inc(len(media.data))
        return media

    async def resolve_all(
        self, parts: Sequence[Part], *, tenant: str = "", deadline: float | None = None
    ) -> list[Media]:
        """Return the bytes of all parts, in order, within the request's limit. Raises what :meth:`resolve` raises.

        The first error cancels all fetches of the request. A URL that occurs twice is fetched once.
        """
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
                inline = part.inline if isinstance(part, ImagePart) else None
                resolved[place] = await self.resolve(part.url, param=part.param, inline=inline)
                charge(part, resolved[place])
            else:
                places.setdefault(part.url, []).append(place)
        slots = asyncio.Semaphore(PARALLEL)

        async def fetch(same: list[int]) -> None:
            first = parts[same[0]]
            async with slots:
                with child_span("fetch image") as span:
                    media = await self.resolve(first.url, param=first.param, tenant=tenant, deadline=deadline)
                    if span:
                        span.set_attributes(
                            {"mmrouter.media.source": media.source, "mmrouter.media.bytes": len(media.data)}
                        )
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
        """Cancel all fetches."""
        await self._fetches.close()
        self._fetcher.close()

    def _from_inline(self, inline: InlineImage) -> Media:
        data_uri.bound(len(inline.data), self._max_bytes)
        return Media(inline.data, mime_type.detect(inline.data), "data", inline.text)

    async def _resolve(self, url: str, tenant: str, deadline: float | None) -> Media:
        if _is_data(url):
            data = data_uri.decode(url, self._max_bytes)
            return Media(data, mime_type.detect(data), "data")
        self._guard.target(url)  # refuse before any network access
        key = (tenant, url)
        stored = self._cache.get(key)
        if stored is not None and stored.fresh_until > self._clock():
            return Media(stored.data, stored.mime, "cache")
        if key in self._fetches:
            self._metrics.media_joined.inc()
        try:
            async with asyncio.timeout_at(deadline):
                return await self._fetches.run(key, lambda: self._fetch(key))
        except TimeoutError as error:
            raise MediaError("timeout", "The media's host did not deliver in time.") from error

    async def _fetch(self, key: Key) -> Media:
        stored = self._cache.get(key)
        with self._metrics.media_fetching.track_inprogress(), self._metrics.media_fetch_seconds.time():
            answer = await self._fetcher.fetch(key[1], stored)
        if isinstance(answer, NotModified):
            assert stored is not None
            self._cache.renew(key, self._clock() + answer.fresh_s)
            return Media(stored.data, stored.mime, "revalidated")
        if not answer.data:
            raise MediaError("empty", "The media's host answered with an empty body.")
        if mime_type.is_page(answer.data):
            raise MediaError("web_page", "The media's host answered with a web page.")
        mime = mime_type.detect(answer.data)
        if answer.fresh_s is not None and (answer.fresh_s or answer.etag or answer.modified):
            fresh_until = self._clock() + answer.fresh_s
            entry = Stored(answer.data, mime, answer.url, answer.etag, answer.modified, fresh_until)
            self._cache.put(key, entry)
        else:
            self._cache.drop(key)
        self._metrics.media_cache_bytes.set(self._cache.size)
        return Media(answer.data, mime, "fetch")


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"
