"""A renderer's side: what it offers, and until when."""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mmrouter_handover.plugin import vllm_items
from mmrouter_handover.plugin.packed_item import Plan
from mmrouter_handover.plugin.processor_cache import Processed
from mmrouter_handover.plugin.ways import Release, Ways
from mmrouter_handover.plugin.wire import HandOverFailed, Offer, Way


class Lending:
    """Leases by name: everything that one answer offered ends together. Usable from several threads."""

    def __init__(self, ways: Ways, settings: str) -> None:
        self._ways, self._settings = ways, settings
        self._leases: dict[str, tuple[list[Release], float]] = {}
        self._mutex = threading.Lock()
        self.counts: Counter[str] = Counter()

    def offer(
        self, items: Mapping[str, Processed | None], ways: Sequence[Way], seconds: float, inline_bytes: int
    ) -> tuple[str, dict[str, Offer], dict[str, str], list[tuple[str, str]]]:
        """Return the lease, the offers, why an image is withheld, and which ways were tried in vain.

        ``items``: what was processed, by name; ``None`` where the cache did not keep it.
        """
        offers: dict[str, Offer] = {}
        withheld: dict[str, str] = {}
        fell: list[tuple[str, str]] = []
        releases: list[Release] = []
        try:
            for name, processed in items.items():
                try:
                    plan = self._plan(name, processed)
                    offers[name], release = self._first(plan, name, ways, seconds, inline_bytes, fell)
                except HandOverFailed as failed:
                    withheld[name] = failed.reason
                    self.counts[f"withheld {failed.reason}"] += 1
                else:
                    releases.append(release)
        except BaseException:  # nobody would learn of what is lent
            _end(releases)
            raise
        for way, reason in fell:
            self.counts[f"{way} fell {reason}"] += 1
        return self._keep(releases, seconds), offers, withheld, fell

    def release(self, lease: str) -> int:
        """End what an answer offered; return how many offers stood."""
        with self._mutex:
            releases, _ = self._leases.pop(lease, ([], 0.0))
        return _end(releases)

    def expire(self) -> None:
        """Forget leases whose time is over: what they lent has ended by itself."""
        with self._mutex:
            now = time.monotonic()
            over = [name for name, (_, until) in self._leases.items() if until <= now]
            releases = [release for name in over for release in self._leases.pop(name)[0]]
        _end(releases)

    def __len__(self) -> int:
        return len(self._leases)

    def _plan(self, name: str, processed: Processed | None) -> Plan:
        if processed is None:
            raise HandOverFailed("uncached", "the renderer's cache did not keep it")
        return vllm_items.pack(self._settings, name, processed)

    def _first(
        self, plan: Plan, name: str, ways: Sequence[Way], seconds: float, inline_bytes: int, fell: list[tuple[str, str]]
    ) -> tuple[Offer, Release]:
        last = HandOverFailed("absent", "no way was asked for")
        for way in ways:
            try:
                offered = self._ways.offer(plan, name, way, seconds, inline_bytes)
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
    """Return what a renderer's cache holds of some images. For the thread that processes them."""
    return {name: cache.get_and_update_item(None, name) if cache.is_cached_item(name) else None for name in names}


def _end(releases: Sequence[Release]) -> int:
    for release in releases:
        release()
    return len(releases)
