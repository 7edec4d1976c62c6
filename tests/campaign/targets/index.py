"""Target ``index``: a deployment in virtual time under drawn faults; no decision may claim what its engine cannot hold.

An input is the seed of one deployment: every fault, loss and request follows from it.
"""

import logging
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from campaign.index.world import Plan, World
from campaign.target import BrokenPropertyError, Target

SECONDS = 12.0  # of virtual time, before everything settles
SHOWN = 3


class IndexHistories(Target):
    """Decisions of routers against the histories of engines' caches (``campaign.index.history``)."""

    name = "index"
    short = 3
    limit_s = 600.0  # of a busy machine: an input takes a quarter of a second of CPU time

    def __enter__(self) -> Self:
        self._level = logging.root.manager.disable
        logging.disable(logging.WARNING)  # sidecars log each fault, thousands of times
        return self

    def __exit__(self, *_: object) -> None:
        logging.disable(self._level)

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        return source.randbytes(6).hex().encode()

    def check(self, data: bytes) -> str:
        with tempfile.TemporaryDirectory(prefix="mmrouter-index-") as folder:
            world = World(data.hex(), Path(folder), Plan())
            world.run(SECONDS)
            world.settle()
        checker, differences = world.checker, world.differences()
        decisions = world.counts.pop("decisions")
        self.totals.update(
            {"decisions": decisions, "reads of a cache": checker.decisions, "faults": world.counts.total()}
        )
        self.totals["blocks claimed"] += checker.blocks
        self.keep_largest(**{"s old view": round(checker.oldest, 2)})
        if checker.violations or differences:
            first = (f"{each.kind}: {each.decision}, block {each.block}" for each in checker.violations[:SHOWN])
            raise BrokenPropertyError(f"{len(checker.violations)} violations; " + "; ".join([*first, *differences]))
        return f"{len(world.counts)} kinds of faults"
