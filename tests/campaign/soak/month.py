"""One engine, sidecar and router in virtual time for days, and the sizes of all that they keep."""

import gc
import hashlib
import sys
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from campaign.index.world import Plan, World
from campaign.soak.flatness import is_flat

from mmrouter_router.explain.decisions import DecisionLog, DecisionTrace
from mmrouter_router.sentinels.table import SentinelTable

DAY = 86_400.0
PLAN = Plan(engines=1, routers=1, blocks=256, prompts=2000, decisions=0.1, requests=0.05, faults=1 / 3600)
JOURNAL_BYTES = 48 << 20
"""Bound of the journal: it is rewritten at 16 MiB, or at four times its size after the last time."""
FLAT_SHARE, FLAT_BLOCKS = 0.02, 30_000
"""Growth of the interpreter's allocated blocks between the last two quarters that counts as flat."""


@dataclass
class Sizes:
    """Samples in the order of time. ``allocated``: blocks of memory that the interpreter has allocated."""

    allocated: list[int] = field(default_factory=list)
    journal: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    decisions: list[int] = field(default_factory=list)
    sentinels: list[int] = field(default_factory=list)


class Month:
    """A world whose router also keeps a decision log and sentinels of ever new images, as SGLang's do."""

    def __init__(self, seed: str, folder: Path, plan: Plan = PLAN, *, images: int = 4096) -> None:
        self.world, self.sizes = World(seed, folder, plan), Sizes()
        self._log, self._table, self._images = DecisionLog(), SentinelTable(images), 0
        self._most_images = images

    def live(self, days: float, samples: int) -> None:
        for _ in range(samples):
            self.world.run(days * DAY / samples)
            self._route(200)
            self._sample()

    def problems(self) -> list[str]:
        """Return what is not flat or above its bound, and what the index did wrong. Ends the world's faults."""
        self.world.settle()
        sizes, blocks = self.sizes, self.world.plan.blocks
        found = [f"{len(self.world.checker.violations)} violations"] if self.world.checker.violations else []
        found += self.world.differences()
        if not is_flat(sizes.allocated, share=FLAT_SHARE, least=FLAT_BLOCKS):
            found.append(f"memory grows: {sizes.allocated[::8]} blocks")
        bounds = (("journal", JOURNAL_BYTES), ("index", 3 * blocks), ("held", blocks), ("decisions", 1000))
        bounds += (("sentinels", self._most_images),)
        for name, bound in bounds:
            if max(getattr(sizes, name)) > bound:
                found.append(f"{name}: {max(getattr(sizes, name))}, above {bound}")
        return found

    def _route(self, count: int) -> None:
        """Add decisions to the log and images to the table, in each of which old ones make room."""
        for _ in range(count):
            self._images += 1
            identity = hashlib.blake2b(self._images.to_bytes(8, "big")).digest()[:32]
            self._table.put(identity, (self._images,), proven=self._images % 2 == 0)
            decision = cast(Any, SimpleNamespace(at=float(self._images)))
            self._log.add(
                f"request-{self._images}",
                DecisionTrace(f"request-{self._images}", decision, 500, array("Q", range(30)), []),
            )

    def _sample(self) -> None:
        gc.collect()
        sizes, pod, router = self.sizes, self.world.pods[0], self.world.routers[0]
        sizes.allocated.append(sys.getallocatedblocks())
        file = pod.settings.state_dir / "ledger.journal"
        sizes.journal.append(file.stat().st_size if file.is_file() else 0)
        sizes.index.append(len(router.fleet.index))
        sizes.held.append(pod.sidecar.relay.ledger.held if pod.sidecar is not None else 0)
        sizes.decisions.append(len(self._log.latest(10**9)))
        sizes.sentinels.append(len(self._table))
