"""Time to the first token and cache hits of a whole cluster by routing policy, simulated (docs/performance.md)."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from bench.cluster.routing_policies import ConsistentHash, Dynamo, LeastLoaded, Ours, Policy, RoundRobin, TextPrefix
from bench.cluster.simulation import simulate
from bench.cluster.virtual_engine import Machine
from bench.cluster.workloads import ClusterLoad, mooncake, servegen
from bench.report import Row, not_run, percentile, row

TRACES: Final = Path(os.environ.get("MMROUTER_TRACES", Path(__file__).resolve().parents[3] / "shared" / "traces"))
LARGE: Final = Machine(
    prefill_rate=25_000.0,
    encode_seconds=16e-6,
    decode_seconds=6e-3,
    read_seconds=16e-9,
    kv_tokens=1_900_000,
    max_batched_tokens=8192,
    max_seqs=1024,
)
SMALL: Final = Machine()
LOADS: Final = (0.5, 0.8)
SIZES: Final = (4, 16, 64)
REUSED: Final = 0.3
"""Share of reusable prompt tokens from which the gain over peers has a goal."""

OURS, ORACLE = "ours", "oracle"
POLICIES: Final[dict[str, Callable[[int, int], Policy]]] = {
    "round robin": lambda engines, size: RoundRobin(engines),
    "least loaded": lambda engines, size: LeastLoaded(engines),
    "consistent hash": lambda engines, size: ConsistentHash(engines),
    "text prefix": lambda engines, size: TextPrefix(engines),
    "Dynamo's scorer": Dynamo,
    OURS: Ours,
    ORACLE: Ours,
}
PEERS: Final = tuple(name for name in POLICIES if name not in (OURS, ORACLE))


@dataclass(frozen=True, slots=True)
class Case:
    workload: str
    engines: int
    share: float

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.engines} engines, load {self.share}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one policy in one case: milliseconds and shares."""

    p50: float
    p95: float
    hits: float
    reusable: float = 0.0  # hits of one cache as large as all engines' together
    alone: float = 0.0  # 95th percentile if every engine had those hits and nothing else to do

    def text(self, name: str) -> str:
        return f"{name}: p50 {self.p50:,.0f}, p95 {self.p95:,.0f} ms, hits {self.hits:.3f}"


SECONDS: Final = {"mooncake": {4: 1200.0, 16: 600.0, 64: 300.0}, "servegen": {4: 120.0, 16: 60.0, 64: 40.0}}
"""Seconds of each trace that are played, by engines: the more engines, the more requests per second."""
WORKLOADS: Final = ("mooncake conversation", "mooncake synthetic", "servegen sessions", "servegen lone images")


def machine_of(workload: str) -> Machine:
    """Return the engines of a workload: long prompts need a cache that holds them."""
    return LARGE if workload.startswith("mooncake") else SMALL


@lru_cache(maxsize=2)
def load_of(case: Case, traces: Path, seconds: float) -> ClusterLoad:
    """Return a case's requests. Raises ``OSError`` for a missing trace."""
    kind, _, which = case.workload.partition(" ")
    machine = machine_of(case.workload)
    if kind == "mooncake":
        return mooncake(traces / "mooncake", which, case.engines, case.share, seconds, machine)
    return servegen(which == "sessions", case.engines, case.share, seconds, machine)


def outcome(case: Case, policy: str, traces: Path, seconds: float) -> Outcome:
    load = load_of(case, traces, seconds)
    chosen = POLICIES[policy](case.engines, load.block_size)
    run = simulate(load, case.engines, machine_of(case.workload), chosen, at_once=policy == ORACLE)
    p50, p95 = (percentile(run.seconds, share) * 1e3 for share in (0.5, 0.95))
    return Outcome(p50, p95, run.hit_ratio, load.reusable, percentile(load.alone, 0.95) * 1e3)


def cases(sizes: Iterable[int]) -> Iterator[Case]:
    """Yield every workload at every load on every cluster."""
    for workload in WORKLOADS:
        for engines in sizes:
            for share in LOADS:
                yield Case(workload, engines, share)


def run(folder: Path = TRACES) -> list[Row]:
    """Simulate all cases; a row says so where Mooncake's traces are missing."""
    possible, rows = [], []
    for case in cases(SIZES):
        if case.workload.startswith("mooncake") and not (folder / "mooncake").is_dir():
            rows.append(not_run(f"cluster {case.name}: TTFT p95", "ms", f"no traces at {folder} (MMROUTER_TRACES)"))
        else:
            possible.append(case)
    pairs = [(case, name) for case in possible for name in POLICIES]
    jobs = [(case, name, folder, SECONDS[case.workload.partition(" ")[0]][case.engines]) for case, name in pairs]
    outcomes = dict(zip(pairs, outcomes_of(jobs), strict=True))
    results = {case: {name: outcomes[case, name] for name in POLICIES} for case in possible}
    return [*summary(results), *(_row(case, results[case]) for case in possible), *rows]


def outcomes_of(jobs: Sequence[tuple[Any, ...]], simulated: Callable[..., Outcome] = outcome) -> list[Outcome]:
    """Return the outcomes of jobs (arguments of ``simulated``), as many at once as there are CPUs."""
    with ProcessPoolExecutor() as pool:
        return list(pool.map(simulated, *zip(*jobs, strict=True)))


def summary(results: dict[Case, dict[str, Outcome]]) -> list[Row]:
    """Return the goals, each in the case that is worst for it, and the means."""
    best = {case: min(PEERS, key=lambda name: outcomes[name].p95) for case, outcomes in results.items()}
    over = {
        case: outcomes[OURS].p95 / min(other.p95 for name, other in outcomes.items() if name != ORACLE)
        for case, outcomes in results.items()
    }
    hits = {case: outcomes[OURS].hits / outcomes[ORACLE].hits for case, outcomes in results.items()}
    gain = {case: outcomes[best[case]].p95 / outcomes[OURS].p95 for case, outcomes in results.items()}
    worst, least = max(over, key=over.__getitem__), min(hits, key=hits.__getitem__)
    rows = [
        row("cluster: TTFT p95 over the best policy, worst case", over[worst], "x", peer=worst.name, goal="<= 1.02"),
        row("cluster: hits over the oracle's, worst case", hits[least], "x", peer=least.name, goal=">= 0.97"),
        row("cluster: hits over the oracle's, mean", mean(hits.values()), "x"),
    ]
    if reusing := [case for case in results if results[case][OURS].reusable > REUSED]:
        case = min(reusing, key=gain.__getitem__)
        rival = results[case][best[case]]
        name = f"cluster: TTFT p95 below the best peer, worst case where over {REUSED:.0%} can be reused"
        peer = f"{case.name}: {best[case]}; alone, {rival.p95 / rival.alone:.2f} x"
        rows.append(row(name, gain[case], "x", peer=peer, goal=">= 1.2"))
    best_peer = "in each case the peer that is best there"
    rows.append(row("cluster: TTFT p95 below the best peer, mean", mean(gain.values()), "x", peer=best_peer))
    for name in PEERS:
        ratio = mean(outcomes[name].p95 / outcomes[OURS].p95 for outcomes in results.values())
        rows.append(row(f"cluster: TTFT p95 below {name}, mean", ratio, "x"))
    return rows


def _row(case: Case, outcomes: dict[str, Outcome]) -> Row:
    ours = outcomes[OURS]
    others = "; ".join([f"alone: p95 {ours.alone:,.0f} ms", *(outcomes[name].text(name) for name in (*PEERS, ORACLE))])
    name = f"cluster {case.name}: TTFT p95 (p50 {ours.p50:,.0f} ms, hits {ours.hits:.3f} of {ours.reusable:.3f})"
    return row(name, ours.p95, "ms", peer=others)


def mean(ratios: Iterable[float]) -> float:
    logs: Sequence[float] = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))
