"""Simulation of encoders in virtual time: the router's scheduler in every mode, fixed splits, and bounds.

An encoder processes one image at a time. Every mode gets the same requests with the same service times.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Final, Literal

from bench.encoders.image_requests import Arrival, Device, shared
from mmrouter_router.core.linear_cost import Line
from mmrouter_router.encoding.scheduler import EncoderScheduler
from mmrouter_router.encoding.types import Encoder, Image, Mode, Outcome

UNBOUNDED: Final = 10**9

Split = Literal["perImage", "perRequest", "blocks"]


class LostError(RuntimeError):
    """A request was lost or never ended, so the run has no figures."""


@dataclass(frozen=True, slots=True)
class SchedulerRun:
    """Result of the scheduler: seconds to all embeddings by request, and images encoded."""

    seconds: list[float]
    encodes: int


def scheduled(
    arrivals: Sequence[Arrival],
    fleet: Sequence[Device],
    mode: Mode,
    *,
    weights: Sequence[int] = (),
    known: bool = False,
) -> SchedulerRun:
    """Run the router's scheduler. Unless ``known``, it starts without the rates and all encoders look alike.

    Raises :class:`LostError` if a request does not end.
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
    encodes = 0

    def do(outcome: Outcome, now: float) -> None:
        nonlocal encodes
        if outcome.failed or outcome.full:
            raise LostError(f"at {now:.3f} s: {outcome.failed or outcome.full}")
        aborted.update(abort.run for abort in outcome.aborts)
        for start in outcome.starts:
            encodes += 1
            heapq.heappush(events, (now + devices[start.encoder].seconds(luck[start.image.key]), 1, start.run))
        for ready in outcome.ready:
            seconds[int(ready.request)] = now - arrivals[int(ready.request)].at

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
    return SchedulerRun(seconds, encodes)


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
    """Return the seconds of a fixed split.

    Image by image or request by request in smooth turns, or request by request in blocks (``a`` times the first, then
    ``b`` times the second), as the peer does.
    """
    turns = cycle(_blocks(weights) if how == "blocks" else _smooth(weights))
    free = [0.0] * len(weights)
    seconds = []
    for at, rows in zip(times.ats, times.images if how == "perImage" else times.whole, strict=True):
        end = at
        for row in rows:
            which = next(turns)
            free[which] = max(free[which], at) + row[which]
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
    """Return the seconds on one server with the sum of the rates that takes requests in order.

    finish = max(arrival, finish of the request before) + sum over its images of 1 / sum over encoders of 1 / time.
    """
    free, seconds = 0.0, []
    for arrival in arrivals:
        free = max(free, arrival.at) + sum(shared(picture, fleet) for picture in arrival.pictures)
        seconds.append(free - arrival.at)
    return seconds


def undivided(arrivals: Sequence[Arrival], fleet: Sequence[Device]) -> list[float]:
    """Return the seconds on that server if an image is on one encoder at a time.

    The oldest image is on the fastest encoder; images move, with their progress, to faster encoders that become free,
    which no real encoder can do.
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


def _blocks(weights: Sequence[int]) -> list[int]:
    return [which for which, weight in enumerate(weights) for _ in range(weight)]
