"""Compares the cache with the server now and then, because a watch cannot be trusted alone.

A watch that starts anew lists what is there and is silent about what went away meanwhile; a watch that died may be
silent about everything. One listing per kind, metadata only, finds both, and tells when the cache is filled at start.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from mmrouter_operator.cluster.cache import Cache
from mmrouter_operator.cluster.client import ApiError, Cluster
from mmrouter_operator.model.refs import MANAGED_BY, RESOURCE
from mmrouter_operator.model.snapshot import Key

log = logging.getLogger(__name__)

INTERVAL, SUSPICIOUS, FIRST = 300.0, 30.0, 0.2
"""Seconds between comparisons: usually, after one that found the cache behind, and until the cache is filled."""
LONGEST_PAUSE = 10.0
"""Seconds between tries, at most, while the server does not answer or does not allow the listing."""
TOLERATED = 3
"""Comparisons in a row that may find the same objects unknown before the watches count as deaf."""


class Audit:
    """``kinds`` in ``namespaces`` (empty text: all of them)."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        kinds: Sequence[str],
        namespaces: Sequence[str],
        changed: Callable[[Key], None],
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._kinds = kinds
        self._namespaces = namespaces
        self._changed = changed
        self._behind: dict[tuple[str, str], int] = {}
        self._wanted = asyncio.Event()
        self.filled = asyncio.Event()
        self.trouble = "nothing was listed yet"
        """Why the caches do not count as filled, or why the last comparison failed; empty when neither."""

    @property
    def deaf(self) -> bool:
        """Whether the watches miss what the server shows, again and again."""
        return self.filled.is_set() and any(times >= TOLERATED for times in self._behind.values())

    def soon(self) -> None:
        """Compare now: something happened that watches may have slept through."""
        self._wanted.set()

    async def run(self) -> None:
        """Compare until cancelled."""
        failures, told = 0, ""
        while True:
            self._wanted.clear()
            try:
                await self.once()
                failures, told = 0, ""
            except ApiError:
                failures += 1
                if self.trouble != told:
                    log.warning("the caches could not be compared with the server: %s", self.trouble)
                told = self.trouble
            pause = self._pause(failures)
            try:
                async with asyncio.timeout(pause):
                    await self._wanted.wait()
            except TimeoutError:
                continue

    def _pause(self, failures: int) -> float:
        """Return the seconds until the next comparison, after so many failures in a row."""
        if not self.filled.is_set():
            return min(LONGEST_PAUSE, FIRST * 2.0 ** min(failures, 10))
        return SUSPICIOUS if self._behind or failures else INTERVAL * random.uniform(0.8, 1.2)

    async def once(self) -> None:
        """Compare every kind once. Raises ``ApiError`` when one cannot be listed; :attr:`trouble` then names the kind.

        The others are compared all the same: what is wrong with one kind may last, and says nothing of them.
        """
        behind: dict[tuple[str, str], int] = {}
        failures: list[ApiError] = []
        for kind in self._kinds:
            try:
                behind |= await self._compare(kind)
            except ApiError as error:
                failures.append(error)
                # Nothing was learnt of it.
                behind |= {unseen: times for unseen, times in self._behind.items() if unseen[0] == kind}
        self._behind = behind
        if failures:
            self.trouble = str(failures[0])
            raise failures[0]
        waiting = sorted({kind for kind, _ in behind})
        self.trouble = f"the watches have not shown everything yet: {', '.join(waiting)}" if waiting else ""
        if not behind and not self.filled.is_set():
            self.filled.set()

    async def _compare(self, kind: str) -> dict[tuple[str, str], int]:
        """Return what the cache should know and does not: how often in a row. Raises ``ApiError``."""
        # In this order: what was known before the listing and is not in it is gone.
        known = self._cache.versions(kind)
        listed: set[str] = set()
        for namespace in self._namespaces:
            try:
                found = await self._cluster.list(kind, namespace, "" if kind == RESOURCE else MANAGED_BY)
            except ApiError as error:
                sentence = f"{kind} cannot be listed in {namespace or 'all namespaces'}: {error}"
                raise ApiError(sentence, status=error.status) from error
            listed |= {obj["metadata"]["uid"] for obj in found}
        for uid in known.keys() - listed:
            for key in self._cache.remove(kind, uid):
                log.info("%s was gone unnoticed", kind, extra={"namespace": key[0], "object": key[1]})
                self._changed(key)
        unseen = listed - self._cache.versions(kind).keys()
        return {(kind, uid): self._behind.get((kind, uid), 0) + 1 for uid in unseen}
