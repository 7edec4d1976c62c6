"""Looks up whether the objects that resources refer to exist. They are not watched, so answers are cached."""

import asyncio
from collections.abc import Sequence

from mmrouter_operator.cluster.client import KubernetesCluster, Refused
from mmrouter_operator.cluster.lease import boot_time
from mmrouter_operator.model.external_refs import Reference
from mmrouter_operator.model.kinds import Ref

EXISTING_SECONDS = 60.0
"""How long an object counts as existing after it was found."""
MISSING_SECONDS = 5.0
"""How long an object counts as missing after it was not found."""
RECHECK_SECONDS = 15.0
"""Seconds until a deployment with a missing object is reconciled again."""


class ExistenceCache:
    """Caches answers by object, not by deployment: many refer to the same object."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        self._cluster = cluster
        self._answers: dict[Ref, tuple[bool, float]] = {}

    async def missing(self, named: Sequence[Reference]) -> tuple[Reference, ...]:
        """Return those of these objects that are missing. Raises ``ApiError``."""
        now = boot_time()
        if len(self._answers) > 10_000:
            self._answers = {ref: answer for ref, answer in self._answers.items() if _fresh(answer, now)}
        stale = {ref for ref, _ in named if not _fresh(self._answers.get(ref), now)}
        await asyncio.gather(*(self._look(ref, now) for ref in stale))
        return tuple((ref, path) for ref, path in named if not self._answers[ref][0])

    async def _look(self, ref: Ref, now: float) -> None:
        try:
            self._answers[ref] = (await self._cluster.exists(ref), now)
        except Refused:
            # The operator may not read the object. Count it as existing: pods report what they lack.
            self._answers[ref] = (True, now)


def _fresh(answer: tuple[bool, float] | None, now: float) -> bool:
    return answer is not None and now < answer[1] + (EXISTING_SECONDS if answer[0] else MISSING_SECONDS)
