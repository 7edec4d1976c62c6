"""Time until all images of a request are encoded, by how they are split over encoders, simulated in virtual time.

Twelve cases: two fleets (rates 8:3:1 and 8:1), Poisson and bursty arrivals, loads 0.3, 0.6 and 0.9. The scheduler does
not know the rates at the start. Mean and 95th percentile are over all requests, including the first ones.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.encoders import simulation as sim
from bench.encoders.image_requests import BURSTY_CV, Arrival, Device, arrivals, image_sizes, load_clients
from bench.rows import Row, percentile, row

SEED: Final = 7
REQUESTS: Final = 5000
LOADS: Final = (0.3, 0.6, 0.9)
LIGHT: Final = 0.1
"""An additional load at which round robin keeps up with both fleets."""
FLEETS: Final[dict[str, tuple[Device, ...]]] = {
    "8:3:1": (Device(8000, 0.004), Device(3000, 0.008), Device(1000, 0.012)),
    "8:1": (Device(8000, 0.004), Device(1000, 0.012)),
}
SHARES: Final = {"8:3:1": (8, 3, 1), "8:1": (8, 1)}
REPEATED: Final = 300
REPEATS: Final = 3000
"""Distinct images, and requests that repeat them."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of one split in one case."""

    mean: float
    p95: float
    name: str = ""

    def text(self) -> str:
        """The figures in words."""
        return f"{self.name}: mean {self.mean * 1e3:,.0f}, p95 {self.p95 * 1e3:,.0f} ms".removeprefix(": ")


@dataclass(frozen=True, slots=True)
class Case:
    """One case and the figures of every split."""

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
    """Run one case with every split; the best fixed split is searched on the measured requests themselves."""
    times = sim.service_times(asked, fleet)
    tried = [
        (how, figures(sim.split(times, how, weights), f"{how} {':'.join(map(str, weights))}"))
        for how, weights in sim.splits(len(fleet))
    ]
    by_p95: Callable[[Figures], float] = lambda each: each.p95  # noqa: E731
    return Case(
        name,
        auto=figures(sim.scheduled(asked, fleet, "auto").seconds),
        known=figures(sim.scheduled(asked, fleet, "auto", known=True).seconds),
        round_robin=figures(sim.scheduled(asked, fleet, "perImage").seconds, "round robin"),
        by_rates=figures(sim.scheduled(asked, fleet, "perRequest", weights=shares).seconds, "perRequest by rates"),
        image_by_rates=figures(sim.scheduled(asked, fleet, "perImage", weights=shares).seconds, "perImage by rates"),
        blocks=min((each for how, each in tried if how == "blocks"), key=by_p95),
        best=min((each for _, each in tried), key=by_p95),
        pooled=figures(sim.pooled(asked, fleet), "pooled"),
        undivided=figures(sim.undivided(asked, fleet), "pooled, undivided images"),
    )


def cases(loads: Iterable[float] = LOADS, requests: int = REQUESTS) -> list[Case]:
    """Run all cases; fixed seeds give equal figures on every machine."""
    clients = load_clients()
    measured = []
    for fleet_name, fleet in FLEETS.items():
        for arrival, cv in (("Poisson", 1.0), ("bursty", BURSTY_CV)):
            for share in loads:
                rnd = random.Random(SEED)
                asked = arrivals(rnd, image_sizes(rnd, clients, requests), fleet, share, cv)
                measured.append(measure(f"{fleet_name}, {arrival}, load {share}", asked, fleet, SHARES[fleet_name]))
    return measured


def repeats() -> tuple[int, int]:
    """Return the number of distinct images and of encodings, where few images are repeated often."""
    rnd = random.Random(SEED)
    clients, fleet = load_clients(), FLEETS["8:3:1"]
    known = [picture for body in image_sizes(rnd, clients, REPEATED) for picture in body][:REPEATED]
    weights = [1 / (rank + 1) for rank in range(REPEATED)]
    bodies = [tuple(rnd.choices(known, weights, k=rnd.randint(1, 4))) for _ in range(REPEATS)]
    asked = arrivals(rnd, bodies, fleet, 0.9, BURSTY_CV)
    shown = {picture.name for body in bodies for picture in body}
    return len(shown), sim.scheduled(asked, fleet, "auto").encodes


def run() -> list[Row]:
    """Return the figures of all cases."""
    measured, light = cases(), cases((LIGHT,))
    shown, encodes = repeats()
    worst, far, further = (
        max(measured, key=lambda case: case.auto.p95 / getattr(case, bound).p95)
        for bound in ("best", "pooled", "undivided")
    )

    def gain(of: Sequence[Case], p95: Callable[[Case], float]) -> float:
        return _mean(p95(case) / case.auto.p95 for case in of)

    overload = "perImage, equal weights: overloads the slowest encoder in every case, so its times grow with the run"
    return [
        row(
            "p95_gain_over_round_robin", gain(measured, lambda c: c.round_robin.p95), "x", peer=overload, goal=">= 1.3"
        ),
        row(
            f"encoders: p95 gain over round robin at load {LIGHT}",
            gain(light, lambda c: c.round_robin.p95),
            "x",
            peer="perImage, equal weights: keeps up only here",
        ),
        row(
            "encoders: p95 gain over weights by true rates",
            gain(measured, lambda c: min(c.by_rates.p95, c.image_by_rates.p95)),
            "x",
            peer="the better of perImage and perRequest",
        ),
        row(
            "encoders: p95 gain over the peer's best a:b",
            gain(measured, lambda c: c.blocks.p95),
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
            1 / gain(measured, lambda c: c.pooled.p95),
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
            1 / gain(measured, lambda c: c.known.p95),
            "x",
            peer="the same scheduler with the rates known at the start",
        ),
        row("encoders: encodes per repeated image", encodes / shown, "x", peer=f"{shown} images", goal="<= 1"),
        *(_row(case) for case in measured),
    ]


def _row(case: Case) -> Row:
    others = (case.pooled, case.undivided, case.best, case.blocks, case.by_rates, case.round_robin)
    text = "; ".join(other.text() for other in others)
    return row(f"encoders {case.name}: p95 (mean {case.auto.mean * 1e3:,.0f} ms)", case.auto.p95 * 1e3, "ms", peer=text)


def _mean(ratios: Iterable[float]) -> float:
    return math.exp(sum(logs := [math.log(ratio) for ratio in ratios]) / len(logs))
