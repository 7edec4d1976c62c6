"""What it costs that routers know of each other's work late or never: 1, 2 and 4 before one cluster, virtual time.

Every router follows all feeds, as frontends do, and a request comes to any of them. What one has under way the others
hear a little later, or only when the engine tells of its blocks; an engine's own queue is not looked at.
"""

import random
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Final

from bench.cluster import policy_comparison
from bench.cluster.policy_comparison import Case, Outcome, mean
from bench.cluster.routing_policies import Ours
from bench.cluster.simulation import simulate
from bench.cluster.workloads import Ask, Load
from bench.rows import Row, not_run, percentile, row

ROUTERS: Final = (1, 2, 4)
HEARD: Final = 0.01
"""Seconds after which routers hear of each other: that long they collect what they tell."""
SIZES: Final = (4, 16)
SECONDS: Final = {"mooncake": {4: 600.0, 16: 300.0}, "servegen": {4: 60.0, 16: 40.0}}
GOAL: Final = "<= 1.05"
"""Of routers that tell each other what they have under way."""


Kind = tuple[int, float | None]
"""Number of routers, and the seconds after which they hear of each other."""
Loads = list[list[tuple[float, float]]]
"""By router and engine: blocks that wait to be computed, blocks in flight."""


class Routers:
    """Several routers before the same engines. ``delay``: seconds after which each hears what the others have in flight
    at every engine, as two sums of blocks; ``None``: never.
    """

    listens = True

    def __init__(self, routers: int, engines: int, block_size: int, delay: float | None = None) -> None:
        self.routers = [Ours(engines, block_size) for _ in range(routers)]
        self._random = random.Random(routers)
        self._took: dict[int, Ours] = {}
        self._delay = delay
        self._told: deque[tuple[float, Loads]] = deque()
        self._heard: Loads = [[(0.0, 0.0)] * engines for _ in range(routers)]

    def choose(self, number: int, ask: Ask, now: float) -> int:
        """Return where the router sends it to which it came."""
        router = self._took[number] = self._random.choice(self.routers)
        if self._delay is None:
            return router.choose(number, ask, now)
        while self._told and self._told[0][0] <= now - self._delay:
            _, self._heard = self._told.popleft()
        others = [loads for other, loads in zip(self.routers, self._heard, strict=True) if other is not router]
        added = [tuple(map(sum, zip(*there, strict=True))) for there in zip(*others, strict=True)] if others else []
        for worker, (queue, active) in zip(router.workers, added, strict=False):
            router.fleet.usage(worker, 0).add(queue, active)
        return router.choose(number, ask, now)

    def watch(self, now: float, _: object) -> None:
        """Let every router tell what it has in flight."""
        loads = [
            [(use.prefill, use.active) if (use := worker.usage.get(0)) else (0.0, 0.0) for worker in router.workers]
            for router in self.routers
        ]
        self._told.append((now, loads))

    def answered(self, number: int) -> None:
        """Only that router sees it."""
        self._took[number].answered(number)

    def ended(self, number: int) -> None:
        """Only that router sees it."""
        self._took.pop(number).ended(number)

    def told(self, engine: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """All follow the feed."""
        for router in self.routers:
            router.told(engine, stored, removed)


def spread(load: Load) -> Load:
    """Return the load with requests of one time spread evenly until the next time.

    Mooncake's traces have times of whole seconds. Requests that come at once are chosen for by routers that cannot have
    heard of each other, whatever they tell: that would be the trace's rounding and not what routers lose.
    """
    moved: list[Ask] = []
    groups = [list(same) for _, same in groupby(load.asks, key=lambda ask: ask.at)]
    ends = [*(same[0].at for same in groups[1:]), groups[-1][0].at]
    for same, end in zip(groups, ends, strict=True):
        moved += [replace(ask, at=ask.at + n / len(same) * (end - ask.at)) for n, ask in enumerate(same)]
    return replace(load, asks=tuple(moved))


def outcome(case: Case, routers: int, traces: Path, seconds: float, delay: float | None = None) -> Outcome:
    """Run a case with so many routers, which hear of each other after ``delay`` seconds or never."""
    load = spread(policy_comparison.load_of(case, traces, seconds))
    policy = Routers(routers, case.engines, load.block_size, delay)
    watch = policy.watch if delay is not None else None
    run = simulate(load, case.engines, policy_comparison.machine_of(case.workload), policy, watch=watch)
    p50, p95 = (percentile(run.seconds, share) * 1e3 for share in (0.5, 0.95))
    return Outcome(p50, p95, run.hit_ratio, load.reusable)


def rows(folder: Path = policy_comparison.TRACES) -> list[Row]:
    """Measure; without Mooncake's traces on the other workloads only, and say so."""
    every = list(policy_comparison.cases(SIZES))
    here = [case for case in every if not case.workload.startswith("mooncake") or (folder / "mooncake").is_dir()]
    missing = (
        [] if len(here) == len(every) else [not_run("routers, mooncake", "x", f"no traces at {folder}", goal=GOAL)]
    )
    kinds: list[Kind] = [(routers, None) for routers in ROUTERS] + [(routers, HEARD) for routers in ROUTERS[1:]]
    jobs = [(case, kind, folder) for case in here for kind in kinds]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(((case, kind) for case, kind, _ in jobs), pool.map(_job, jobs), strict=True))
    return [*summary(found), *missing]


def summary(found: dict[tuple[Case, Kind], Outcome]) -> list[Row]:
    """Return per number of routers and engines the mean of all cases, and the case that is worst."""
    made = []
    alone = {case: one for (case, kind), one in found.items() if kind == (1, None)}
    kinds = sorted({kind for _, kind in found if kind[0] > 1}, key=lambda kind: (kind[0], kind[1] or 0.0))
    for kind in kinds:
        for engines in sorted({case.engines for case in alone}):
            some = [case for case in alone if case.engines == engines]
            over = {case: found[case, kind].p95 / alone[case].p95 for case in some}
            hits = [found[case, kind].hits / alone[case].hits for case in some]
            worst = max(over, key=over.__getitem__)
            words = "; ".join(f"{case.workload}, load {case.share}: {ratio:.3f}" for case, ratio in over.items())
            name = f"{kind[0]} routers before {engines} engines"
            if kind[1] is None:
                name += ", if each knew of its own requests only"
            goal = GOAL if kind[1] is not None else None
            made += [
                row(f"{name}: TTFT p95 over 1 router, mean", mean(over.values()), "x", peer=words, goal=goal),
                row(f"{name}: TTFT p95 over 1 router, worst case", over[worst], "x", peer=worst.name),
                row(f"{name}: hits over 1 router's, mean", mean(hits), "x"),
            ]
    return made


def _job(job: tuple[Case, Kind, Path]) -> Outcome:
    case, (routers, delay), folder = job
    return outcome(case, routers, folder, SECONDS[case.workload.partition(" ")[0]][case.engines], delay)
