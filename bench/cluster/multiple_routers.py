"""Loss of 1, 2 and 4 routers before one cluster that learn late of each other's requests, simulated
(docs/performance.md, *replicas*). An engine's own queue is not considered.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Final

from bench.cluster import policy_comparison
from bench.cluster.policy_comparison import Case, Outcome, mean
from bench.cluster.routing_policies import Ours
from bench.cluster.simulation import simulate
from bench.cluster.workloads import ClusterLoad, ClusterRequest
from bench.report import Row, not_run, percentile, row

ROUTERS: Final = (1, 2, 4)
GOSSIP_DELAY: Final = 0.01
"""Seconds for which a router collects its load before it sends it to the others."""
SIZES: Final = (4, 16)
SECONDS: Final = {"mooncake": {4: 600.0, 16: 300.0}, "servegen": {4: 60.0, 16: 40.0}}
GOAL: Final = "<= 1.05"

Loads = list[list[tuple[float, float]]]
"""By router and engine: blocks waiting to be computed, blocks in flight."""


class Routers:
    """Several routers in front of the same engines. ``delay``: seconds after which each learns the others' blocks in
    flight at every engine.
    """

    listens = True

    def __init__(self, routers: int, engines: int, block_size: int, delay: float = GOSSIP_DELAY) -> None:
        self.routers = [Ours(engines, block_size) for _ in range(routers)]
        self._random = random.Random(routers)
        self._router_of: dict[int, Ours] = {}
        self._delay = delay
        self._sent: deque[tuple[float, Loads]] = deque()
        self._received: Loads = [[(0.0, 0.0)] * engines for _ in range(routers)]

    def choose(self, number: int, request: ClusterRequest, now: float) -> int:
        router = self._router_of[number] = self._random.choice(self.routers)
        while self._sent and self._sent[0][0] <= now - self._delay:
            _, self._received = self._sent.popleft()
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
        self._sent.append((now, loads))

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
    run = simulate(load, case.engines, policy_comparison.machine_of(case.workload), policy, watch=policy.watch)
    p50, p95 = (percentile(run.seconds, share) * 1e3 for share in (0.5, 0.95))
    return Outcome(p50, p95, run.hit_ratio, load.reusable)


def rows(folder: Path = policy_comparison.TRACES) -> list[Row]:
    """Simulate all cases; a row says so where Mooncake's traces are missing."""
    every = list(policy_comparison.cases(SIZES))
    here = [case for case in every if not case.workload.startswith("mooncake") or (folder / "mooncake").is_dir()]
    missing = (
        [] if len(here) == len(every) else [not_run("routers, mooncake", "x", f"no traces at {folder}", goal=GOAL)]
    )
    pairs = [(case, routers) for case in here for routers in ROUTERS]
    jobs = [(case, routers, folder, SECONDS[case.workload.partition(" ")[0]][case.engines]) for case, routers in pairs]
    outcomes = policy_comparison.outcomes_of(jobs, outcome)
    return [*summary(dict(zip(pairs, outcomes, strict=True))), *missing]


def summary(outcomes: dict[tuple[Case, int], Outcome]) -> list[Row]:
    """Return per number of routers and engines the mean of all cases, and the case that is worst."""
    result_rows = []
    alone = {case: result for (case, routers), result in outcomes.items() if routers == 1}
    for routers in sorted({routers for _, routers in outcomes if routers > 1}):
        for engines in sorted({case.engines for case in alone}):
            some = [case for case in alone if case.engines == engines]
            over = {case: outcomes[case, routers].p95 / alone[case].p95 for case in some}
            hits = [outcomes[case, routers].hits / alone[case].hits for case in some]
            worst = max(over, key=over.__getitem__)
            words = "; ".join(f"{case.workload}, load {case.share}: {ratio:.3f}" for case, ratio in over.items())
            name = f"{routers} routers before {engines} engines"
            result_rows += [
                row(f"{name}: TTFT p95 over 1 router, mean", mean(over.values()), "x", peer=words, goal=GOAL),
                row(f"{name}: TTFT p95 over 1 router, worst case", over[worst], "x", peer=worst.name),
                row(f"{name}: hits over 1 router's, mean", mean(hits), "x"),
            ]
    return result_rows
