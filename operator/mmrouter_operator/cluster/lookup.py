"""Whether the objects that a resource names exist. Nothing watches them, so the answers are kept for a while."""

import asyncio
from collections.abc import Sequence

from mmrouter_operator.boot_clock import boot_time
from mmrouter_operator.cluster.client import Cluster, Refused
from mmrouter_operator.model.refs import Ref
from mmrouter_operator.model.snapshot import Missing

KNOWN_FOR = 60.0
"""Seconds for which an object that was there is taken to be there."""
MISSING_FOR = 5.0
"""Seconds after which a missing object is looked for again."""
LOOK_AGAIN = 15.0
"""Seconds until a deployment with a missing object is looked at again."""


class Lookup:
    """Answers are kept by object, not by deployment: many name the same."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[Ref, tuple[bool, float]] = {}

    async def missing(self, named: Sequence[tuple[Ref, str]]) -> tuple[Missing, ...]:
        """Return what is not there, of objects and the fields that name them. Raises ``ApiError``."""
        now = boot_time()
        if len(self._known) > 10_000:
            self._known = {ref: known for ref, known in self._known.items() if _fresh(known, now)}
        asked = {ref for ref, _ in named if not _fresh(self._known.get(ref), now)}
        # Each answer is kept as it comes: one that fails does not have the others asked for again.
        await asyncio.gather(*(self._look(ref, now) for ref in asked))
        return tuple(Missing(ref.kind, ref.name, path) for ref, path in named if not self._known[ref][0])

    async def _look(self, ref: Ref, now: float) -> None:
        self._known[ref] = (await self._there(ref), now)

    async def _there(self, ref: Ref) -> bool:
        try:
            return await self._cluster.exists(ref)
        except Refused:
            # Not allowed to look. The pods will say what they lack.
            return True


def _fresh(known: tuple[bool, float] | None, now: float) -> bool:
    return known is not None and now < known[1] + (KNOWN_FOR if known[0] else MISSING_FOR)
