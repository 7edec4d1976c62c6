"""Which named objects are there: asked once per object, kept for a while."""

from collections import Counter
from typing import Any

import pytest

from mmrouter_operator.cluster.client import Unavailable
from mmrouter_operator.cluster.existence import ExistenceCache
from mmrouter_operator.model.kinds import Ref
from mmrouter_operator.model.snapshot import Missing

THERE, GONE, BROKEN = (Ref("v1", "Secret", "team", name) for name in ("there", "gone", "broken"))
NAMED = [(ref, f"spec.{ref.name}") for ref in (THERE, GONE, BROKEN)]


class Few:
    """A cluster with one Secret, that fails for another until it is mended."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.broken = True

    async def exists(self, ref: Ref) -> bool:
        self.asked[ref.name] += 1
        if ref == BROKEN and self.broken:
            raise Unavailable("down")
        return ref == THERE


async def test_an_answer_that_fails_does_not_have_the_others_asked_for_again() -> None:
    few = Few()
    cluster: Any = few
    lookup = ExistenceCache(cluster)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await lookup.missing(NAMED)
    few.broken = False
    expected = (Missing("Secret", "gone", "spec.gone"), Missing("Secret", "broken", "spec.broken"))
    assert await lookup.missing(NAMED) == expected
    assert await lookup.missing(NAMED) == expected
    assert few.asked == {"there": 1, "gone": 1, "broken": 4}
