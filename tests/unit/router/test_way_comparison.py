"""Whether renderers process images, on simulated queues: the rule takes the way that serves more under the same load.

A processed image goes through a renderer, the engine's front end, which only reads it, and the model; any other image
through the front end, which processes it, and the model. Every station takes requests in order. Times scatter by 20 %.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrouter_router.handover.comparison import CYCLE, PERIOD, WayComparison
from mmrouter_router.handover.ways import AUTO_GAIN

TOKENS = 500
RULE = partial(WayComparison, AUTO_GAIN)


class Fixed:
    """Takes one way whatever it costs."""

    def __init__(self, processed: bool, _: Callable[[], float]) -> None:
        self.processes = lambda: processed

    def begin(self, engine: str, *, processed: bool) -> None: ...

    def end(self, engine: str, tokens: int, *, processed: bool) -> None: ...


ENGINE, RENDERER = partial(Fixed, False), partial(Fixed, True)


@dataclass(frozen=True)
class Load:
    """Seconds of each station for a request. ``clients`` send their next request after an answer; with ``rate``,
    requests per second at a time, they arrive regardless of answers. ``begins``: the wall clock.
    """

    front: float = 1.0
    render: float = 1.1
    read: float = 0.05
    model: float = 0.1
    renderers: int = 2
    clients: int = 8
    rate: Callable[[float], float] | None = None
    frontends: int = 1
    seconds: float = 2 * CYCLE * PERIOD
    begins: float = 0.0


@dataclass(frozen=True)
class Served:
    """Answers of the second half: their number per second, mean seconds, and the share that renderers processed."""

    rate: float
    seconds: float
    processed: float


def serve(kind: Callable[[Callable[[], float]], Any], load: Load) -> Served:
    draw, now, events, answers = random.Random(5), load.begins, [], []
    rules = [kind(lambda: now) for _ in range(load.frontends)]
    free = {"front": [now], "model": [now], "render": [now] * load.renderers}

    def station(name: str, seconds: float) -> float:
        """Return when a station has done the request that comes to it now."""
        done = max(now, heapq.heappop(free[name])) + seconds
        heapq.heappush(free[name], done)
        return done

    def at(when: float, what: Callable[[], None]) -> None:
        heapq.heappush(events, (when, len(events), draw.random(), what))

    def arrive() -> None:
        rule, scale, began = draw.choice(rules), draw.uniform(0.8, 1.2), now
        processed = rule.processes()
        rule.begin("engine", processed=processed)

        def answer() -> None:
            rule.end("engine", TOKENS, processed=processed)
            answers.append((now, now - began, processed))
            if load.rate is None:
                arrive()

        def compute() -> None:
            at(station("model", load.model * scale), answer)

        def accept() -> None:
            at(station("front", (load.read if processed else load.front) * scale), compute)

        at(station("render", load.render * scale) if processed else now, accept)
        if load.rate is not None:
            at(now + draw.expovariate(load.rate(now - load.begins)), arrive)

    for _ in range(load.clients if load.rate is None else 1):
        at(now, arrive)
    while events[0][0] < load.begins + load.seconds:
        now, *_, what = heapq.heappop(events)
        what()
    late = [row for row in answers if row[0] > load.begins + load.seconds / 2]
    return Served(len(late) / load.seconds * 2, mean(row[1] for row in late), mean(row[2] for row in late))


@pytest.mark.parametrize("begins", [0.0, 100.0, 7.5 * PERIOD])  # in the periods of the engine, the renderer, and none
@pytest.mark.parametrize(
    ("load", "processed"),
    [
        (Load(clients=4), True),  # the engine's one front end is the bottleneck
        (Load(clients=32, front=0.05, render=0.055, read=0.002, model=0.01), True),
        (Load(frontends=3), True),
        (Load(clients=1), False),  # no queue: the renderer is a detour
        (Load(clients=1, render=0.5), True),
        (Load(renderers=1, render=1.2), False),
        (Load(front=0.5, render=0.3, model=1.0), False),  # the model is the bottleneck, so nothing is gained
        (Load(clients=4, front=2.7, render=3.6), True),  # slow, as on two busy CPUs
        (Load(rate=lambda _: 0.1), False),
        (Load(rate=lambda _: 1.6), True),
    ],
)
def test_nearly_all_requests_take_the_way_that_serves_more_under_their_load(
    load: Load, processed: bool, begins: float
) -> None:
    share = serve(RULE, replace(load, begins=begins)).processed
    assert share > 0.85 if processed else share < 0.15


@given(
    st.floats(0.2, 2), st.floats(0.2, 2), st.floats(0.01, 1.5), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3, 8])
)
@settings(max_examples=30, deadline=None)
def test_closed_loops_are_served_nearly_as_fast_as_by_the_better_way_alone(
    front: float, render: float, model: float, renderers: int, clients: int
) -> None:
    load = Load(front=front, render=render, model=model, renderers=renderers, clients=clients)
    engine, renderer = serve(ENGINE, load).rate, serve(RENDERER, load).rate
    assert serve(RULE, load).rate > 0.8 * max(engine, AUTO_GAIN * renderer)


def test_engines_that_become_overloaded_are_relieved() -> None:
    """Requests wait longer than a period before the other way is tried, so that none of its answers shows its cost."""
    load = Load(rate=lambda since: 0.2 if since < 1.25 * CYCLE * PERIOD else 1.5, seconds=8 * CYCLE * PERIOD)
    assert serve(ENGINE, load).seconds > 5 * PERIOD
    assert serve(RULE, load).seconds < 2 * serve(RENDERER, load).seconds


def test_a_way_that_fails_costs_its_time() -> None:
    now, taken = 0.0, []
    rule = RULE(lambda: now)
    while now < CYCLE * PERIOD:
        processed = rule.processes()
        taken.append((now, processed))
        rule.begin("engine", processed=processed)
        now += 0.7 if processed else 1.0
        rule.end("engine", 0 if processed and len(taken) % 2 else TOKENS, processed=processed)
    assert any(processed for _, processed in taken)
    assert not any(processed for when, processed in taken if when > 2 * PERIOD)


def test_a_measured_minute_counts_each_engine_alone() -> None:
    """Two engines that work at once are not one that works twice as fast."""
    now = 0.0
    rule = RULE(lambda: now)
    while now < CYCLE * PERIOD - 10:
        processed = rule.processes()
        engines = ("one", "other") if not processed else ("one",)
        for engine in engines:
            rule.begin(engine, processed=processed)
        now += 1.0 if not processed else 0.8
        for engine in engines:
            rule.end(engine, TOKENS, processed=processed)
    assert rule.processes()
