"""Loss of 1, 2 and 4 routers before one cluster that learn late of each other's requests, simulated
(docs/performance.md, *replicas*). An engine's own queue is not considered.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean
from typing import Final

from bench.cluster import policy_comparison
from bench.cluster.policy_comparison import Case, Outcome
from bench.cluster.routing_policies import Ours, Policy
from bench.cluster.simulation import simulate
from bench.cluster.workloads import ClusterLoad, ClusterRequest
from bench.report import Row, not_run, row

ROUTERS: Final = (1, 2, 4)
GOSSIP_DELAY: Final = 0.01
"""Seconds for which a router collects its load before it sends it to the others."""
SIZES: Final = (4, 16)
SECONDS: Final = {"mooncake": {4: 600.0, 16: 300.0}, "servegen": {4: 60.0, 16: 40.0}}
GOAL: Final = "<= 1.05"

Loads = list[list[tuple[float, float]]]
"""By router and engine: blocks waiting to be computed, blocks in flight."""


class Routers(Policy):
    """Several routers in front of the same engines. ``delay``: seconds after which each learns the others' blocks in
    flight at every engine.
    """

    def __init__(self, routers: int, engines: int, block_size: int, delay: float = GOSSIP_DELAY) -> None:
        self.routers = [Ours(engines, block_size) for _ in range(routers)]
        self._random = random.Random(routers)
        self._router_of: dict[int, Ours] = {}
        self._delay = delay
        self._published: deque[tuple[float, Loads]] = deque()
        self._received: Loads = [[(0.0, 0.0)] * engines for _ in range(routers)]

    def choose(self, number: int, request: ClusterRequest, now: float) -> int:
        router = self._router_of[number] = self._random.choice(self.routers)
        while self._published and self._published[0][0] <= now - self._delay:
            _, self._received = self._published.popleft()
        others = [loads for other, loads in zip(self.routers, self._received, strict=True) if other is not router]
        added = [tuple(map(sum, zip(*engine, strict=True))) for engine in zip(*others, strict=True)] if others else []
        for worker, (queue, active) in zip(router.workers, added, strict=False):
            router.fleet.usage(worker, 0).set_peers(queue, active)
        return router.choose(number, request, now)

    def watch(self, now: float, _: object) -> None:
        loads = [
            [(use.prefill, use.active) if (use := worker.usage.get(0)) else (0.0, 0.0) for worker in router.workers]
            for router in self.routers
        ]
        self._published.append((now, loads))

    def answered(self, number: int) -> None:
        self._router_of[number].answered(number)

    def ended(self, number: int) -> None:
        self._router_of.pop(number).ended(number)

    def cache_changed(self, engine: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for router in self.routers:
            router.cache_changed(engine, stored, removed)


def spread(load: ClusterLoad) -> ClusterLoad:
    """Return the load with requests of one time spread evenly until the next time. Mooncake's traces have times of
    whole seconds. Simultaneous requests are placed before any router can learn of the others: that loss would be an
    artefact of the trace's rounding.
    """
    moved: list[ClusterRequest] = []
    groups = [list(same) for _, same in groupby(load.requests, key=lambda request: request.at)]
    ends = [*(same[0].at for same in groups[1:]), groups[-1][0].at]
    for same, end in zip(groups, ends, strict=True):
        moved += [
            replace(request, at=request.at + n / len(same) * (end - request.at)) for n, request in enumerate(same)
        ]
    return replace(load, requests=tuple(moved))


def outcome(case: Case, routers: int, traces: Path, seconds: float) -> Outcome:
    """Run a case with so many routers that learn each other's load :data:`GOSSIP_DELAY` late."""
    load = spread(policy_comparison.load_of(case, traces, seconds))
    policy = Routers(routers, case.engines, load.block_size)
    return Outcome.of(load, simulate(load, case.engines, case.machine, policy, watch=policy.watch))


def rows() -> list[Row]:
    """Simulate all cases; a row says so where Mooncake's traces are missing."""
    results, missing = policy_comparison.simulate_all(outcome, ROUTERS, SIZES, SECONDS, policy_comparison.TRACES)
    reason = f"no traces at {policy_comparison.TRACES}"
    return [*summary(results), *([not_run("routers, mooncake", "x", reason, goal=GOAL)] if missing else [])]


def summary(results: dict[Case, dict[int, Outcome]]) -> list[Row]:
    """Return per number of routers and engines the mean of all cases, and the case that is worst."""
    result_rows = []
    for routers in ROUTERS[1:]:
        for engines in sorted({case.engines for case in results}):
            some = {case: by_routers for case, by_routers in results.items() if case.engines == engines}
            over = {case: by_routers[routers].p95 / by_routers[1].p95 for case, by_routers in some.items()}
            hits = [by_routers[routers].hits / by_routers[1].hits for by_routers in some.values()]
            worst = max(over, key=over.__getitem__)
            words = "; ".join(f"{case.workload}, load {case.share}: {ratio:.3f}" for case, ratio in over.items())
            name = f"{routers} routers before {engines} engines"
            result_rows += [
                row(f"{name}: TTFT p95 over 1 router, mean", geometric_mean(over.values()), "x", peer=words, goal=GOAL),
                row(f"{name}: TTFT p95 over 1 router, worst case", over[worst], "x", peer=worst.name),
                row(f"{name}: hits over 1 router's, mean", geometric_mean(hits), "x"),
            ]
    return result_rows
