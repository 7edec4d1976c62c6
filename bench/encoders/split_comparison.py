"""Time until all images of a request are encoded, by the way to spread them: a simulation in virtual time.

Twelve cases: two fleets (rates 8:3:1 and 8:1), Poisson and bursty arrivals, loads 0.3, 0.6 and 0.9. The scheduler does
not know the rates at the start. The mean and the 95th percentile are over all requests, the first ones included.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.encoders import simulation as sim
from bench.encoders.image_requests import BURSTY_CV, Arrival, Device, arrivals, load, pictures
from bench.rows import Row, percentile, row

SEED: Final = 7
REQUESTS: Final = 5000
LOADS: Final = (0.3, 0.6, 0.9)
LIGHT: Final = 0.1
"""A load at which round robin keeps up with both fleets; not one of the cases."""
FLEETS: Final[dict[str, tuple[Device, ...]]] = {
    "8:3:1": (Device(8000, 0.004), Device(3000, 0.008), Device(1000, 0.012)),
    "8:1": (Device(8000, 0.004), Device(1000, 0.012)),
}
SHARES: Final = {"8:3:1": (8, 3, 1), "8:1": (8, 1)}
REPEATED: Final = 300
REPEATS: Final = 3000
"""Different images, and requests that show them."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of one way in one case."""

    mean: float
    p95: float
    name: str = ""

    def text(self) -> str:
        """Return them for people."""
        return f"{self.name}: mean {self.mean * 1e3:,.0f}, p95 {self.p95 * 1e3:,.0f} ms".removeprefix(": ")


@dataclass(frozen=True, slots=True)
class Case:
    """One case and what every way gave in it."""

    name: str
    auto: Figures
    known: Figures
    round_robin: Figures
    by_rates: Figures
    image_by_rates: Figures
    blocks: Figures
    best: Figures
    pooled: Figures
    undivided: Figures


def figures(seconds: Sequence[float], name: str = "") -> Figures:
    """Return mean and 95th percentile."""
    return Figures(sum(seconds) / len(seconds), percentile(seconds, 0.95), name)


def measure(name: str, asked: Sequence[Arrival], fleet: Sequence[Device], shares: Sequence[int]) -> Case:
    """Run one case in every way; the best fixed split is found on the very requests that it is measured with."""
    times = sim.table(asked, fleet)
    tried = [
        (how, figures(sim.split(times, how, weights), f"{how} {':'.join(map(str, weights))}"))
        for how, weights in sim.splits(len(fleet))
    ]
    by_p95: Callable[[Figures], float] = lambda found: found.p95  # noqa: E731
    return Case(
        name,
        auto=figures(sim.scheduled(asked, fleet, "auto").seconds),
        known=figures(sim.scheduled(asked, fleet, "auto", known=True).seconds),
        round_robin=figures(sim.scheduled(asked, fleet, "perImage").seconds, "round robin"),
        by_rates=figures(sim.scheduled(asked, fleet, "perRequest", weights=shares).seconds, "perRequest by rates"),
        image_by_rates=figures(sim.scheduled(asked, fleet, "perImage", weights=shares).seconds, "perImage by rates"),
        blocks=min((found for how, found in tried if how == "blocks"), key=by_p95),
        best=min((found for _, found in tried), key=by_p95),
        pooled=figures(sim.pooled(asked, fleet), "pooled"),
        undivided=figures(sim.undivided(asked, fleet), "pooled, undivided images"),
    )


def cases(loads: Iterable[float] = LOADS, requests: int = REQUESTS) -> list[Case]:
    """Run all cases. Equal seeds, so equal figures on every machine."""
    clients = load()
    found = []
    for fleet_name, fleet in FLEETS.items():
        for arrival, cv in (("Poisson", 1.0), ("bursty", BURSTY_CV)):
            for share in loads:
                rnd = random.Random(SEED)
                asked = arrivals(rnd, pictures(rnd, clients, requests), fleet, share, cv)
                found.append(measure(f"{fleet_name}, {arrival}, load {share}", asked, fleet, SHARES[fleet_name]))
    return found


def repeats() -> tuple[int, int]:
    """Return how many different images were shown, and how many times one was encoded: few images, shown often."""
    rnd = random.Random(SEED)
    clients, fleet = load(), FLEETS["8:3:1"]
    known = [picture for body in pictures(rnd, clients, REPEATED) for picture in body][:REPEATED]
    weights = [1 / (rank + 1) for rank in range(REPEATED)]
    bodies = [tuple(rnd.choices(known, weights, k=rnd.randint(1, 4))) for _ in range(REPEATS)]
    asked = arrivals(rnd, bodies, fleet, 0.9, BURSTY_CV)
    shown = {picture.name for body in bodies for picture in body}
    return len(shown), sim.scheduled(asked, fleet, "auto").encodes


def run() -> list[Row]:
    """Return the figures of all cases."""
    found = cases()
    light = cases((LIGHT,))
    shown, encodes = repeats()
    gain = _mean(case.round_robin.p95 / case.auto.p95 for case in found)
    worst = max(found, key=lambda case: case.auto.p95 / case.best.p95)
    far = max(found, key=lambda case: case.auto.p95 / case.pooled.p95)
    further = max(found, key=lambda case: case.auto.p95 / case.undivided.p95)
    return [
        row(
            "p95_gain_over_round_robin",
            gain,
            "x",
            peer="perImage, equal weights: overloads the slowest encoder in every case, so its times grow with the run",
            goal=">= 1.3",
        ),
        row(
            f"encoders: p95 gain over round robin at load {LIGHT}",
            _mean(case.round_robin.p95 / case.auto.p95 for case in light),
            "x",
            peer="perImage, equal weights: keeps up only here",
        ),
        row(
            "encoders: p95 gain over weights by true rates",
            _mean(min(case.by_rates.p95, case.image_by_rates.p95) / case.auto.p95 for case in found),
            "x",
            peer="the better of perImage and perRequest",
        ),
        row(
            "encoders: p95 gain over the peer's best a:b",
            _mean(case.blocks.p95 / case.auto.p95 for case in found),
            "x",
            peer="a requests to the first, then b to the second; best found by search",
        ),
        row(
            "worst_case_over_best_static",
            worst.auto.p95 / worst.best.p95,
            "x",
            peer=f"{worst.name}: {worst.best.text()}",
            goal="<= 1.02",
        ),
        row(
            "over_pooled_bound",
            _mean(case.auto.p95 / case.pooled.p95 for case in found),
            "x",
            peer="geometric mean; one server with the sum of the rates",
            goal="<= 1.15",
        ),
        row(
            "encoders: over pooled bound, worst case", far.auto.p95 / far.pooled.p95, "x", peer=far.name, goal="<= 1.15"
        ),
        row(
            "encoders: over pooled bound with undivided images, worst case",
            further.auto.p95 / further.undivided.p95,
            "x",
            peer=further.name,
            goal="<= 1.15",
        ),
        row(
            "encoders: p95 over that of known rates",
            _mean(case.auto.p95 / case.known.p95 for case in found),
            "x",
            peer="the same scheduler, told the rates at the start",
        ),
        row("encoders: encodes per repeated image", encodes / shown, "x", peer=f"{shown} images", goal="<= 1"),
        *[_row(case) for case in found],
    ]


def _row(case: Case) -> Row:
    others = (case.pooled, case.undivided, case.best, case.blocks, case.by_rates, case.round_robin)
    text = "; ".join(other.text() for other in others)
    return row(f"encoders {case.name}: p95 (mean {case.auto.mean * 1e3:,.0f} ms)", case.auto.p95 * 1e3, "ms", peer=text)


def _mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(logs := [math.log(ratio) for ratio in ratios]) / len(logs))
