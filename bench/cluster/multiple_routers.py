"""Loss of 1, 2 and 4 routers in front of one cluster that learn late or never of each other's requests, simulated.

Every router follows all feeds, as frontends do, and a request reaches any of them. The others learn of it a little
later, or only when the engine publishes its blocks; an engine's own queue is not considered.
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
from bench.cluster.workloads import ClusterLoad, ClusterRequest
from bench.rows import Row, not_run, percentile, row

ROUTERS: Final = (1, 2, 4)
GOSSIP_DELAY: Final = 0.01
"""Seconds for which a router collects its load before it sends it to the others."""
SIZES: Final = (4, 16)
SECONDS: Final = {"mooncake": {4: 600.0, 16: 300.0}, "servegen": {4: 60.0, 16: 40.0}}
GOAL: Final = "<= 1.05"
"""For routers that share their load."""

Variant = tuple[int, float | None]
"""Number of routers, and the delay in seconds with which they learn each other's load."""
Loads = list[list[tuple[float, float]]]
"""By router and engine: blocks waiting to be computed, blocks in flight."""


class Routers:
    """Several routers in front of the same engines. ``delay``: seconds after which each learns the others' blocks in
    flight at every engine; ``None``: never.
    """

    listens = True

    def __init__(self, routers: int, engines: int, block_size: int, delay: float | None = None) -> None:
        self.routers = [Ours(engines, block_size) for _ in range(routers)]
        self._random = random.Random(routers)
        self._router_of: dict[int, Ours] = {}
        self._delay = delay
        self._sent: deque[tuple[float, Loads]] = deque()
        self._received: Loads = [[(0.0, 0.0)] * engines for _ in range(routers)]

    def choose(self, number: int, request: ClusterRequest, now: float) -> int:
        """Let a random router choose."""
        router = self._router_of[number] = self._random.choice(self.routers)
        if self._delay is None:
            return router.choose(number, request, now)
        while self._sent and self._sent[0][0] <= now - self._delay:
            _, self._received = self._sent.popleft()
        others = [loads for other, loads in zip(self.routers, self._received, strict=True) if other is not router]
        added = [tuple(map(sum, zip(*engine, strict=True))) for engine in zip(*others, strict=True)] if others else []
        for worker, (queue, active) in zip(router.workers, added, strict=False):
            router.fleet.usage(worker, 0).set_peers(queue, active)
        return router.choose(number, request, now)

    def watch(self, now: float, _: object) -> None:
        """Let every router send its load."""
        loads = [
            [(use.prefill, use.active) if (use := worker.usage.get(0)) else (0.0, 0.0) for worker in router.workers]
            for router in self.routers
        ]
        self._sent.append((now, loads))

    def answered(self, number: int) -> None:
        self._router_of[number].answered(number)

    def ended(self, number: int) -> None:
        self._router_of.pop(number).ended(number)

    def cache_changed(self, engine: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Pass the change on to every router."""
        for router in self.routers:
            router.cache_changed(engine, stored, removed)


def spread(load: ClusterLoad) -> ClusterLoad:
    """Return the load with requests of one time spread evenly until the next time.

    Mooncake's traces have times of whole seconds. Simultaneous requests are placed before any router can learn of the
    others: that loss would be an artefact of the trace's rounding.
    """
    moved: list[ClusterRequest] = []
    groups = [list(same) for _, same in groupby(load.requests, key=lambda request: request.at)]
    ends = [*(same[0].at for same in groups[1:]), groups[-1][0].at]
    for same, end in zip(groups, ends, strict=True):
        moved += [
            replace(request, at=request.at + n / len(same) * (end - request.at)) for n, request in enumerate(same)
        ]
    return replace(load, requests=tuple(moved))


def outcome(case: Case, routers: int, traces: Path, seconds: float, delay: float | None = None) -> Outcome:
    """Run a case with so many routers that learn each other's load after ``delay`` seconds or never."""
    load = spread(policy_comparison.load_of(case, traces, seconds))
    policy = Routers(routers, case.engines, load.block_size, delay)
    watch = policy.watch if delay is not None else None
    run = simulate(load, case.engines, policy_comparison.machine_of(case.workload), policy, watch=watch)
    p50, p95 = (percentile(run.seconds, share) * 1e3 for share in (0.5, 0.95))
    return Outcome(p50, p95, run.hit_ratio, load.reusable)


def rows(folder: Path = policy_comparison.TRACES) -> list[Row]:
    """Simulate all cases; a row says so where Mooncake's traces are missing."""
    every = list(policy_comparison.cases(SIZES))
    here = [case for case in every if not case.workload.startswith("mooncake") or (folder / "mooncake").is_dir()]
    missing = (
        [] if len(here) == len(every) else [not_run("routers, mooncake", "x", f"no traces at {folder}", goal=GOAL)]
    )
    variants: list[Variant] = [(routers, None) for routers in ROUTERS] + [
        (routers, GOSSIP_DELAY) for routers in ROUTERS[1:]
    ]
    jobs = [(case, variant, folder) for case in here for variant in variants]
    with ProcessPoolExecutor() as pool:
        outcomes = dict(zip(((case, variant) for case, variant, _ in jobs), pool.map(_job, jobs), strict=True))
    return [*summary(outcomes), *missing]


def summary(outcomes: dict[tuple[Case, Variant], Outcome]) -> list[Row]:
    """Return per number of routers and engines the mean of all cases, and the case that is worst."""
    result_rows = []
    alone = {case: result for (case, variant), result in outcomes.items() if variant == (1, None)}
    variants = sorted(
        {variant for _, variant in outcomes if variant[0] > 1}, key=lambda variant: (variant[0], variant[1] or 0.0)
    )
    for variant in variants:
        for engines in sorted({case.engines for case in alone}):
            some = [case for case in alone if case.engines == engines]
            over = {case: outcomes[case, variant].p95 / alone[case].p95 for case in some}
            hits = [outcomes[case, variant].hits / alone[case].hits for case in some]
            worst = max(over, key=over.__getitem__)
            words = "; ".join(f"{case.workload}, load {case.share}: {ratio:.3f}" for case, ratio in over.items())
            name = f"{variant[0]} routers before {engines} engines"
            if variant[1] is None:
                name += ", if each knew of its own requests only"
            goal = GOAL if variant[1] is not None else None
            result_rows += [
                row(f"{name}: TTFT p95 over 1 router, mean", mean(over.values()), "x", peer=words, goal=goal),
                row(f"{name}: TTFT p95 over 1 router, worst case", over[worst], "x", peer=worst.name),
                row(f"{name}: hits over 1 router's, mean", mean(hits), "x"),
            ]
    return result_rows


def _job(job: tuple[Case, Variant, Path]) -> Outcome:
    case, (routers, delay), folder = job
    return outcome(case, routers, folder, SECONDS[case.workload.partition(" ")[0]][case.engines], delay)
