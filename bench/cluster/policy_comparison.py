"""Time to the first token and cache hits of a whole cluster by routing policy, simulated (docs/performance.md)."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Final, Self, TypeVar

from bench.cluster.routing_policies import ConsistentHash, Dynamo, LeastLoaded, Ours, Policy, TextPrefix
from bench.cluster.simulation import SimulationResult, simulate
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
    "round robin": lambda engines, size: Policy(engines),
    "least loaded": lambda engines, size: LeastLoaded(engines),
    "consistent hash": lambda engines, size: ConsistentHash(engines),
    "text prefix": lambda engines, size: TextPrefix(engines),
    "Dynamo's scorer": Dynamo,
    OURS: Ours,
    ORACLE: Ours,
}
PEERS: Final = tuple(name for name in POLICIES if name not in (OURS, ORACLE))
Way = TypeVar("Way")


@dataclass(frozen=True, slots=True)
class Case:
    workload: str
    engines: int
    share: float

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.engines} engines, load {self.share}"

    @property
    def machine(self) -> Machine:
        """The engines: long prompts need a cache that holds them."""
        return LARGE if self.workload.startswith("mooncake") else SMALL


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one policy in one case: milliseconds and shares."""

    p50: float
    p95: float
    hits: float
    reusable: float = 0.0  # hits of one cache as large as all engines' together
    alone: float = 0.0  # 95th percentile if every engine had those hits and nothing else to do

    @classmethod
    def of(cls, load: ClusterLoad, run: SimulationResult) -> Self:
        p50, p95, alone = ((run.seconds, 0.5), (run.seconds, 0.95), (load.alone, 0.95))
        return cls(
            percentile(*p50) * 1e3, percentile(*p95) * 1e3, run.hit_ratio, load.reusable, percentile(*alone) * 1e3
        )

    def text(self, name: str) -> str:
        return f"{name}: p50 {self.p50:,.0f}, p95 {self.p95:,.0f} ms, hits {self.hits:.3f}"


SECONDS: Final = {"mooncake": {4: 1200.0, 16: 600.0, 64: 300.0}, "servegen": {4: 120.0, 16: 60.0, 64: 40.0}}
"""Seconds of each trace that are played, by engines: the more engines, the more requests per second."""
WORKLOADS: Final = ("mooncake conversation", "mooncake synthetic", "servegen sessions", "servegen lone images")


@lru_cache(maxsize=2)
def load_of(case: Case, traces: Path, seconds: float) -> ClusterLoad:
    """Return a case's requests. Raises ``OSError`` for a missing trace."""
    kind, _, which = case.workload.partition(" ")
    if kind == "mooncake":
        return mooncake(traces / "mooncake", which, case.engines, case.share, seconds, case.machine)
    return servegen(which == "sessions", case.engines, case.share, seconds, case.machine)


def outcome(case: Case, policy: str, traces: Path, seconds: float) -> Outcome:
    load = load_of(case, traces, seconds)
    chosen = POLICIES[policy](case.engines, load.block_size)
    return Outcome.of(load, simulate(load, case.engines, case.machine, chosen, at_once=policy == ORACLE))


def run(folder: Path = TRACES) -> list[Row]:
    """Simulate all cases; a row says so where Mooncake's traces are missing."""
    results, missing = simulate_all(outcome, list(POLICIES), SIZES, SECONDS, folder)
    why = f"no traces at {folder} (MMROUTER_TRACES)"
    absent = [not_run(f"cluster {case.name}: TTFT p95", "ms", why) for case in missing]
    return [*summary(results), *(_row(case, outcomes) for case, outcomes in results.items()), *absent]


def simulate_all(
    simulated: Callable[[Case, Way, Path, float], Outcome],
    ways: Sequence[Way],
    sizes: Sequence[int],
    seconds: Mapping[str, Mapping[int, float]],
    folder: Path,
) -> tuple[dict[Case, dict[Way, Outcome]], list[Case]]:
    """Simulate every workload and load on clusters of these sizes in several ways, as many at once as there are CPUs.
    Return the outcomes, and the cases whose traces are missing.
    """
    cases = [Case(*values) for values in product(WORKLOADS, sizes, LOADS)]
    missing = [c for c in cases if c.workload.startswith("mooncake") and not (folder / "mooncake").is_dir()]
    possible = [case for case in cases if case not in missing]
    jobs = [(case, way, folder, seconds[case.workload.split()[0]][case.engines]) for case in possible for way in ways]
    with ProcessPoolExecutor() as pool:
        outcomes = pool.map(simulated, *zip(*jobs, strict=True))
        return {case: {way: next(outcomes) for way in ways} for case in possible}, missing


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
        row("cluster: hits over the oracle's, mean", geometric_mean(hits.values()), "x"),
    ]
    if reusing := [case for case in results if results[case][OURS].reusable > REUSED]:
        case = min(reusing, key=gain.__getitem__)
        rival = results[case][best[case]]
        name = f"cluster: TTFT p95 below the best peer, worst case where over {REUSED:.0%} can be reused"
        peer = f"{case.name}: {best[case]}; alone, {rival.p95 / rival.alone:.2f} x"
        rows.append(row(name, gain[case], "x", peer=peer, goal=">= 1.2"))
    best_peer = "in each case the peer that is best there"
    rows.append(row("cluster: TTFT p95 below the best peer, mean", geometric_mean(gain.values()), "x", peer=best_peer))
    for name in PEERS:
        ratio = geometric_mean(outcomes[name].p95 / outcomes[OURS].p95 for outcomes in results.values())
        rows.append(row(f"cluster: TTFT p95 below {name}, mean", ratio, "x"))
    return rows


def _row(case: Case, outcomes: dict[str, Outcome]) -> Row:
    ours = outcomes[OURS]
    others = "; ".join([f"alone: p95 {ours.alone:,.0f} ms", *(outcomes[name].text(name) for name in (*PEERS, ORACLE))])
    name = f"cluster {case.name}: TTFT p95 (p50 {ours.p50:,.0f} ms, hits {ours.hits:.3f} of {ours.reusable:.3f})"
    return row(name, ours.p95, "ms", peer=others)
