"""Time until all images of a request are encoded, by how they are split over encoders, simulated in virtual time
(docs/disaggregation.md#choosing-an-encoder). Figures are over all requests, including the first ones.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from operator import attrgetter
from statistics import geometric_mean
from typing import Final, Literal

from bench.encoders.image_requests import BURSTY_CV, Arrival, Device, arrivals, image_sizes, load_clients, shared
from bench.report import Row, percentile, row
from mmrouter_router.core.linear_cost import Line
from mmrouter_router.encoding.encoder_queue import Encoder, Image, Mode, Outcome
from mmrouter_router.encoding.scheduler import EncoderScheduler

SEED: Final = 7
REQUESTS: Final = 5000
LOADS: Final = (0.3, 0.6, 0.9)
FLEETS: Final[dict[str, tuple[Device, ...]]] = {
    "8:3:1": (Device(8000, 0.004), Device(3000, 0.008), Device(1000, 0.012)),
    "8:1": (Device(8000, 0.004), Device(1000, 0.012)),
}


@dataclass(frozen=True, slots=True)
class Figures:
    mean: float
    p95: float
    name: str = ""

    def text(self) -> str:
        return f"{self.name}: mean {self.mean * 1e3:,.0f}, p95 {self.p95 * 1e3:,.0f} ms".removeprefix(": ")


Case = dict[str, Figures]
"""The figures of every split in one case."""


def figures(seconds: Sequence[float], name: str = "") -> Figures:
    """Return mean and 95th percentile."""
    return Figures(sum(seconds) / len(seconds), percentile(seconds, 0.95), name)


def measure(asked: Sequence[Arrival], fleet: Sequence[Device]) -> Case:
    """Run one case with every split; the best fixed split is searched on the measured requests themselves."""
    times = service_times(asked, fleet)
    tried = (
        figures(split(times, how, weights), f"{how} {':'.join(map(str, weights))}")
        for how, weights in splits(len(fleet))
    )
    return {
        "auto": figures(scheduled(asked, fleet, "auto")),
        "known": figures(scheduled(asked, fleet, "auto", known=True)),
        "pooled": figures(pooled(asked, fleet), "pooled"),
        "undivided": figures(undivided(asked, fleet), "pooled, undivided images"),
        "best": min(tried, key=attrgetter("p95")),
        "round robin": figures(scheduled(asked, fleet, "perImage"), "round robin"),
    }


def cases(loads: Iterable[float] = LOADS, requests: int = REQUESTS) -> dict[str, Case]:
    """Run all cases, by name; fixed seeds give equal figures on every machine."""
    clients = load_clients()
    measured = {}
    for fleet_name, fleet in FLEETS.items():
        for arrival, cv in (("Poisson", 1.0), ("bursty", BURSTY_CV)):
            for share in loads:
                rnd = random.Random(SEED)
                asked = arrivals(rnd, image_sizes(rnd, clients, requests), fleet, share, cv)
                name = f"{fleet_name}, {arrival}, load {share}"
                measured[name] = measure(asked, fleet)
    return measured


def run() -> list[Row]:
    measured = cases()

    def gain(split: str) -> float:
        return geometric_mean(case[split].p95 / case["auto"].p95 for case in measured.values())

    def worst(split: str) -> tuple[float, str]:
        return max((case["auto"].p95 / case[split].p95, name) for name, case in measured.items())

    over_best, worst_name = worst("best")
    overload = "perImage, equal weights: overloads the slowest encoder in every case, so its times grow with the run"
    one_server = "geometric mean; one server with the sum of the rates"
    rates_known = "the same scheduler with the rates known at the start"
    undivided_name = "encoders: over pooled bound with undivided images, worst case"
    table: list[tuple[str, float, str, str | None]] = [
        ("p95_gain_over_round_robin", gain("round robin"), overload, ">= 1.3"),
        ("worst_case_over_best_static", over_best, f"{worst_name}: {measured[worst_name]['best'].text()}", "<= 1.02"),
        ("over_pooled_bound", 1 / gain("pooled"), one_server, "<= 1.15"),
        ("encoders: over pooled bound, worst case", *worst("pooled"), "<= 1.15"),
        (undivided_name, *worst("undivided"), "<= 1.15"),
        ("encoders: p95 over that of known rates", 1 / gain("known"), rates_known, None),
    ]
    rows = [row(name, value, "x", peer=peer, goal=goal) for name, value, peer, goal in table]
    return rows + [_row(name, case) for name, case in measured.items()]


def _row(name: str, case: Case) -> Row:
    others = ("pooled", "undivided", "best", "round robin")
    text, auto = "; ".join(case[other].text() for other in others), case["auto"]
    return row(f"encoders {name}: p95 (mean {auto.mean * 1e3:,.0f} ms)", auto.p95 * 1e3, "ms", peer=text)


UNBOUNDED: Final = 10**9

Split = Literal["perImage", "perRequest", "blocks"]


class LostError(RuntimeError):
    """A request was lost or never ended, so the run has no figures."""


def scheduled(
    arrivals: Sequence[Arrival],
    fleet: Sequence[Device],
    mode: Mode,
    *,
    weights: Sequence[int] = (),
    known: bool = False,
) -> list[float]:
    """Return the seconds until each request has all embeddings from the router's scheduler. Unless ``known``, it starts
    without the rates and all encoders look alike. Raises :class:`LostError` if a request does not end.
    """
    names = [f"e{number}" for number in range(len(fleet))]
    devices = dict(zip(names, fleet, strict=True))
    first: Callable[[str], Line] = lambda kind: Line(0.005, 0.001)  # noqa: E731
    if known:
        first = lambda kind: Line(devices[kind].overhead, 1 / devices[kind].rate)  # noqa: E731
    machine = EncoderScheduler(mode, first)
    for number, name in enumerate(names):
        weight = weights[number] if weights else 100
        machine.join(Encoder(name, kind=name, weight=weight, queue=UNBOUNDED), 0.0)
    luck = {str(p.name).encode(): p for arrival in arrivals for p in arrival.pictures}
    events: list[tuple[float, int, int]] = [(a.at, 0, number) for number, a in enumerate(arrivals)]
    heapq.heapify(events)
    aborted: set[int] = set()
    seconds = [math.nan] * len(arrivals)

    def do(outcome: Outcome, now: float) -> None:
        if outcome.failed or outcome.full:
            raise LostError(f"at {now:.3f} s: {outcome.failed or outcome.full}")
        aborted.update(outcome.aborts)
        for start in outcome.starts:
            heapq.heappush(events, (now + devices[start.encoder].seconds(luck[start.image.key]), 1, start.run))
        for request in outcome.ready:
            seconds[int(request)] = now - arrivals[int(request)].at

    while events:
        tick = machine.next_tick(-1.0)
        if tick < events[0][0]:
            do(machine.tick(tick), tick)
        now, what, number = heapq.heappop(events)
        if what == 0:
            images = [Image(str(p.name).encode(), p.tokens, p.tokens) for p in arrivals[number].pictures]
            do(machine.place(str(number), images, now), now)
        elif number not in aborted:
            do(machine.finished(number, now), now)
    if any(math.isnan(value) for value in seconds):
        raise LostError(f"{sum(map(math.isnan, seconds))} requests never ended")
    return seconds


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Seconds by encoder of each image and of each whole request, computed once for all splits."""

    ats: tuple[float, ...]
    images: tuple[tuple[tuple[float, ...], ...], ...]
    whole: tuple[tuple[tuple[float, ...], ...], ...]  # as images, one row per request


def service_times(arrivals: Sequence[Arrival], fleet: Sequence[Device]) -> ServiceTimes:
    images = tuple(tuple(tuple(d.seconds(p) for d in fleet) for p in arrival.pictures) for arrival in arrivals)
    whole = tuple((tuple(map(sum, zip(*rows, strict=True))),) for rows in images)
    return ServiceTimes(tuple(arrival.at for arrival in arrivals), images, whole)


def split(times: ServiceTimes, how: Split, weights: Sequence[int]) -> list[float]:
    """Return the seconds of a fixed split. Image by image or request by request in smooth turns, or request by request
    in blocks (``a`` times the first, then ``b`` times the second), as the peer does.
    """
    blocks = [which for which, weight in enumerate(weights) for _ in range(weight)]
    turns = cycle(blocks if how == "blocks" else _smooth(weights))
    free = [0.0] * len(weights)
    seconds = []
    for at, bodies in zip(times.ats, times.images if how == "perImage" else times.whole, strict=True):
        end = at
        for each in bodies:
            which = next(turns)
            free[which] = max(free[which], at) + each[which]
            end = max(end, free[which])
        seconds.append(end - at)
    return seconds


def splits(encoders: int) -> Iterator[tuple[Split, tuple[int, ...]]]:
    """Yield the fixed splits to try: the fastest encoder's share up to 16, the others' up to 4."""
    shares = [(1, 2, 3, 4, 6, 8, 10, 12, 16), (0, 1, 2, 3, 4), (0, 1)]
    if encoders == 2:
        shares = [tuple(range(1, 21)), (0, 1, 2)]
    ways: tuple[Split, ...] = ("perRequest", "blocks", "perImage")
    for how in ways:
        for weights in product(*shares):
            if math.gcd(*weights) == 1:
                yield how, weights


def pooled(arrivals: Sequence[Arrival], fleet: Sequence[Device]) -> list[float]:
    """Return the seconds on one server with the sum of the rates that takes requests in order. finish = max(arrival,
    finish of the request before) + sum over its images of 1 / sum over encoders of 1 / time.
    """
    free, seconds = 0.0, []
    for arrival in arrivals:
        free = max(free, arrival.at) + sum(shared(picture, fleet) for picture in arrival.pictures)
        seconds.append(free - arrival.at)
    return seconds


def undivided(arrivals: Sequence[Arrival], fleet: Sequence[Device]) -> list[float]:
    """Return the seconds on that server if an image is on one encoder at a time. The oldest image is on the fastest
    encoder; images move, with their progress, to faster encoders that become free, which no real encoder can do.
    """
    ranked = sorted(fleet, key=lambda device: -device.rate)
    inside: list[tuple[int, list[float]]] = []  # request, and seconds left on each encoder
    left = [len(arrival.pictures) for arrival in arrivals]
    seconds = [0.0] * len(arrivals)
    now, coming = 0.0, 0
    while coming < len(arrivals) or inside:
        until = arrivals[coming].at if coming < len(arrivals) else math.inf
        served = list(enumerate(inside[: len(ranked)]))
        until = min([until, *(now + times[which] for which, (_, times) in served)])
        for which, (request, times) in served:
            if now + times[which] <= until:
                inside.remove((request, times))
                left[request] -= 1
                if not left[request]:
                    seconds[request] = until - arrivals[request].at
            else:
                share = 1 - (until - now) / times[which]
                times[:] = [value * share for value in times]
        now = until
        while coming < len(arrivals) and arrivals[coming].at <= now:
            largest_first = sorted(arrivals[coming].pictures, key=lambda picture: -picture.tokens)
            inside += [(coming, [device.seconds(picture) for device in ranked]) for picture in largest_first]
            coming += 1
    return seconds


def _smooth(weights: Sequence[int]) -> list[int]:
    credit, turns = [0] * len(weights), []
    for _ in range(sum(weights)):
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        chosen = max((e for e, weight in enumerate(weights) if weight), key=lambda e: (credit[e], -e))
        credit[chosen] -= sum(weights)
        turns.append(chosen)
    return turns
