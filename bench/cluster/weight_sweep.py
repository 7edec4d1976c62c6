"""What other weights of the scorer would give: one weight at a time, around those that are in use."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

from msgspec.structs import asdict, replace

from bench.cluster.policy_comparison import ORACLE, OURS, TRACES, Case, Outcome, mean, outcome
from bench.rows import Row, row
from mmrouter_router.scheduling.scoring import WEIGHTS, Weights

TRIED: Final[dict[str, tuple[float, ...]]] = {
    "compute": (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0),
    "decode": (0.0, 0.003, 0.01, 0.03, 0.1, 1.0),
    "visual": (0.0, 0.2, 0.4, 0.8),
}
SECONDS: Final = {"mooncake": 900.0, "servegen": 90.0}
ENGINES: Final = 4
LOADS: Final = (0.5, 0.8)
WORKLOADS: Final = ("mooncake conversation", "mooncake synthetic", "servegen sessions", "servegen lone images")


def variants() -> list[tuple[str, Weights]]:
    """Return every set of weights that is tried, named by what is different, the one in use first."""
    found = [("in use", WEIGHTS)]
    for name, values in TRIED.items():
        found += [(f"{name} {v:g}", replace(WEIGHTS, **{name: v})) for v in values if v != asdict(WEIGHTS)[name]]
    return found


def sweep(traces: Path | None = None) -> list[Row]:
    """Return a row per set of weights: its p95 over that of the weights in use, the mean of all cases.

    Raises ``OSError`` without Mooncake's traces: weights that were found on half of the cases would be others.
    """
    folder = traces or TRACES
    cases = [Case(workload, ENGINES, share) for workload in WORKLOADS for share in LOADS]
    tried = variants()
    jobs = [(case, policy, folder, weights) for case in cases for policy, weights in _runs(tried)]
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(_job, jobs))
    width = len(jobs) // len(cases)
    by_case = [found[start : start + width] for start in range(0, len(found), width)]
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


def _runs(tried: Sequence[tuple[str, Weights]]) -> list[tuple[str, Weights]]:
    return [(OURS, weights) for _, weights in tried] + [(ORACLE, WEIGHTS)]


def _job(job: tuple[Case, str, Path, Weights]) -> Outcome:
    case, policy, traces, weights = job
    return outcome(case, policy, traces, SECONDS[case.workload.partition(" ")[0]], weights)
