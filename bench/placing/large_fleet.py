"""CPU microseconds of a placement by the number of workers (docs/performance.md, *fleet*): by prompt, after a change of
one worker, and in turns. The prompt's keys are computed before; times are of one thread.
"""

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from bench.placing import workload
from bench.placing.decision_time import Ours
from bench.placing.workload import BLOCK_SIZE, BlockWorkload, build
from bench.report import Row, percentile, row
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.scoring import Policy

SIZES = (64, 256, 1000)
QUERIES, BLOCKS_PER_WORKER = 200, 500
GOALS = {("kv", 1000): "<= 300", ("after a change", 1000): "<= 1000"}


class LargeFleet:
    """A placer before workers that hold blocks, with prompts whose keys are known."""

    def __init__(self, load: BlockWorkload) -> None:
        ours = Ours(load)
        self.placer, self.fleet, self._changes = ours.placer, ours.fleet, 0
        self._workers = list(self.fleet)
        self.prompts: Sequence[Prepared] = [workload.prepared(ids) for ids in load.queries]
        for prompt in self.prompts:
            prompt.keys(BLOCK_SIZE)

    def place(self, number: int, policy: Policy = "kv") -> None:
        self.placer.place(self.prompts[number % len(self.prompts)], policy=policy)

    def change(self) -> None:
        """Let a worker begin draining, or end it again, so that at most one drains."""
        worker = self._workers[self._changes // 2 % len(self._workers)]
        self._changes += 1
        assert worker.heartbeat is not None
        beat = msgspec.structs.replace(worker.heartbeat, draining=not worker.heartbeat.draining)
        self.fleet.on_published(worker, beat)


def run() -> list[Row]:
    rows: list[Row] = []
    for workers in SIZES:
        fleet = LargeFleet(build(workers=workers, blocks_per_worker=BLOCKS_PER_WORKER, queries=QUERIES))
        ways: dict[str, tuple[Callable[[], None], Callable[[int], None]]] = {
            "kv": (lambda: None, fleet.place),
            "after a change": (fleet.change, fleet.place),
            "round robin": (lambda: None, partial(fleet.place, policy="roundRobin")),
        }
        gc.collect()
        gc.freeze()
        try:
            for way, (before, place) in ways.items():
                us = _timed(before, place)
                for share, label in ((0.5, "p50"), (0.99, "p99")):
                    goal = GOALS.get((way, workers)) if label == "p50" else None
                    rows.append(
                        row(f"placement, {workers} workers, {way}: {label}", percentile(us, share), "us", goal=goal)
                    )
        finally:
            gc.unfreeze()
    return rows


def _timed(before: Callable[[], None], place: Callable[[int], None]) -> list[float]:
    place(0)
    us = []
    for number in range(QUERIES):
        before()
        began = time.thread_time_ns()
        place(number)
        us.append((time.thread_time_ns() - began) / 1000)
    return us
