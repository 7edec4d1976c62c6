"""The renderer's side: offer processed images by lease, and end the leases."""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mmrouter_handover.plugin import vllm_items
from mmrouter_handover.plugin.packed_item import PackedItem
from mmrouter_handover.plugin.processor_cache import Processed
from mmrouter_handover.plugin.transports import Release, Transports
from mmrouter_handover.plugin.wire import HandOverFailed, Offer, Way


class ItemLender:
    """Leases by name; all offers of one answer end together. Usable from several threads."""

    def __init__(self, transports: Transports, settings: str) -> None:
        self._transports, self._settings = transports, settings
        self._leases: dict[str, tuple[list[Release], float]] = {}
        self._mutex = threading.Lock()
        self.counts: Counter[str] = Counter()

    def offer(
        self, items: Mapping[str, Processed | None], ways: Sequence[Way], seconds: float, inline_bytes: int
    ) -> tuple[str, dict[str, Offer], dict[str, str], list[tuple[str, str]]]:
        """Return the lease, the offers, the reasons of images without an offer, and the ways that failed.

        ``items``: processed images by name; ``None`` if the cache did not keep one.
        """
        offers: dict[str, Offer] = {}
        withheld: dict[str, str] = {}
        fell: list[tuple[str, str]] = []
        releases: list[Release] = []
        try:
            for name, processed in items.items():
                try:
                    item = self._pack(name, processed)
                    offers[name], release = self._offer(item, name, ways, seconds, inline_bytes, fell)
                except HandOverFailed as failed:
                    withheld[name] = failed.reason
                    self.counts[f"withheld {failed.reason}"] += 1
                else:
                    releases.append(release)
        except BaseException:  # the caller gets no lease to end
            _end(releases)
            raise
        for way, reason in fell:
            self.counts[f"{way} fell {reason}"] += 1
        return self._keep(releases, seconds), offers, withheld, fell

    def release(self, lease: str) -> int:
        """End the offers of an answer; return how many there were."""
        with self._mutex:
            releases, _ = self._leases.pop(lease, ([], 0.0))
        return _end(releases)

    def expire(self) -> None:
        """Drop leases whose time is over; their slots have ended already."""
        with self._mutex:
            now = time.monotonic()
            over = [name for name, (_, until) in self._leases.items() if until <= now]
            releases = [release for name in over for release in self._leases.pop(name)[0]]
        _end(releases)

    def __len__(self) -> int:
        return len(self._leases)

    def _pack(self, name: str, processed: Processed | None) -> PackedItem:
        if processed is None:
            raise HandOverFailed("uncached", "the renderer's cache did not keep it")
        return vllm_items.pack(self._settings, name, processed)

    def _offer(
        self,
        item: PackedItem,
        name: str,
        ways: Sequence[Way],
        seconds: float,
        inline_bytes: int,
        fell: list[tuple[str, str]],
    ) -> tuple[Offer, Release]:
        last = HandOverFailed("absent", "the request names no way")
        for way in ways:
            try:
                offered = self._transports.offer(item, name, way, seconds, inline_bytes)
            except HandOverFailed as failed:
                last = failed
                fell.append((way, failed.reason))
            else:
                self.counts[f"offered {way}"] += 1
                return offered
        raise last

    def _keep(self, releases: list[Release], seconds: float) -> str:
        self.expire()
        lease = secrets.token_hex(16)
        with self._mutex:
            self._leases[lease] = (releases, time.monotonic() + seconds)
        return lease


def from_cache(cache: Any, names: Sequence[str]) -> dict[str, Processed | None]:
    """Return images from a renderer's cache. To be called in the thread that processes images."""
    return {name: cache.get_and_update_item(None, name) if cache.is_cached_item(name) else None for name in names}


def _end(releases: Sequence[Release]) -> int:
    for release in releases:
        release()
    return len(releases)
