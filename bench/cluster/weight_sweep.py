"""Effect of other weights of the scorer: one weight at a time, around those in use."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

from msgspec.structs import asdict, replace

from bench.cluster.policy_comparison import LOADS, ORACLE, OURS, TRACES, WORKLOADS, Case, Outcome, mean, outcome
from bench.rows import Row, row
from mmrouter_router.scheduling.scoring import WEIGHTS, Weights

TRIED: Final[dict[str, tuple[float, ...]]] = {
    "compute": (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0),
    "decode": (0.0, 0.003, 0.01, 0.03, 0.1, 1.0),
    "visual": (0.0, 0.2, 0.4, 0.8),
}
SECONDS: Final = {"mooncake": 900.0, "servegen": 90.0}
ENGINES: Final = 4


def variants() -> list[tuple[str, Weights]]:
    """Return every set of weights to try, named by its difference, the one in use first."""
    sets = [("in use", WEIGHTS)]
    for name, values in TRIED.items():
        sets += [(f"{name} {v:g}", replace(WEIGHTS, **{name: v})) for v in values if v != asdict(WEIGHTS)[name]]
    return sets


def sweep(traces: Path | None = None) -> list[Row]:
    """Return a row per set of weights: its p95 over that of the weights in use, the mean of all cases.

    Raises ``OSError`` without Mooncake's traces: half of the cases would favour other weights.
    """
    folder = traces or TRACES
    cases = [Case(workload, ENGINES, share) for workload in WORKLOADS for share in LOADS]
    tried = variants()
    runs = [(OURS, weights) for _, weights in tried] + [(ORACLE, WEIGHTS)]
    jobs = [(case, policy, folder, weights) for case in cases for policy, weights in runs]
    with ProcessPoolExecutor() as pool:
        outcomes = list(pool.map(_job, jobs))
    width = len(runs)
    by_case = [outcomes[start : start + width] for start in range(0, len(outcomes), width)]
    rows = []
    for number, (name, _) in enumerate(tried):
        ratios = [results[number].p95 / results[0].p95 for results in by_case]
        hits = [results[number].hits / results[-1].hits for results in by_case]
        text = "; ".join(
            f"{case.workload} {case.share}: {ratio:.3f}, hits {hit:.3f}"
            for case, ratio, hit in zip(cases, ratios, hits, strict=True)
        )
        rows.append(row(f"cluster sweep, {name}: p95, mean", mean(ratios), "x", peer=text))
        rows.append(row(f"cluster sweep, {name}: hits over the oracle's, mean", mean(hits), "x"))
    return rows


def _job(job: tuple[Case, str, Path, Weights]) -> Outcome:
    case, policy, traces, weights = job
    return outcome(case, policy, traces, SECONDS[case.workload.partition(" ")[0]], weights)
