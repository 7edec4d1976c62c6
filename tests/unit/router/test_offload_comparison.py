"""Whether work is done elsewhere, on simulated queues: the rules take the way that serves more under the same load.

A processed image goes through a renderer, the engine's front end, which only reads it, and the model; any other image
through the front end, which processes it, and the model. A prompt goes through a prefill engine, a transfer and one
step of the decode engine, or is computed by the decode engine. Every station takes requests in order. Times scatter by
20 % and grow with the tokens.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmrouter_router.handover.ways import AUTO_GAIN
from mmrouter_router.scheduling.disaggregation import OffloadPolicy
from mmrouter_router.scheduling.offload_comparison import CYCLE, PERIOD, WayComparison

TOKENS = 2000
RULE = partial(WayComparison, AUTO_GAIN)


class Fixed:
    """Takes one way whatever it costs."""

    def __init__(self, elsewhere: bool, _: Callable[[], float]) -> None:
        self.elsewhere = lambda tokens: elsewhere

    def begin(self, engine: str, *, elsewhere: bool) -> None: ...

    def end(self, request: None, tokens: int) -> None: ...


class Offload:
    """The rule for prompts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._policy = OffloadPolicy(clock=clock)
        self.begin, self.end = self._policy.comparison.begin, self._policy.comparison.end

    def elsewhere(self, tokens: int) -> bool:
        return not self._policy.reason_local(tokens)


ENGINE, ELSEWHERE = partial(Fixed, False), partial(Fixed, True)


@dataclass(frozen=True)
class Load:
    """Seconds of each station for a request of :data:`TOKENS`; ``read`` and ``move``, a transfer without a queue, are
    equal for all. ``clients`` send their next request after an answer; with ``rate``, requests per second at a time,
    they arrive regardless of answers. ``begins``: the wall clock.
    """

    front: float = 1.0
    render: float = 1.1
    move: float = 0.0
    read: float = 0.05
    model: float = 0.1
    renderers: int = 2
    sizes: tuple[int, ...] = (TOKENS,)
    clients: int = 8
    rate: Callable[[float], float] | None = None
    frontends: int = 1
    seconds: float = 2 * CYCLE * PERIOD
    begins: float = 0.0


@dataclass(frozen=True)
class Served:
    """Answers of the second half: their number per second, mean seconds, and the share of work done elsewhere, of all
    and by size."""

    rate: float
    seconds: float
    elsewhere: float
    by_size: dict[int, float]


def serve(kind: Callable[[Callable[[], float]], Any], load: Load) -> Served:
    draw, sizes, now, events, answers = random.Random(5), random.Random(7), load.begins, [], []
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
        rule, scale, tokens, began = draw.choice(rules), draw.uniform(0.8, 1.2), sizes.choice(load.sizes), now
        scale *= tokens / TOKENS
        elsewhere = rule.elsewhere(tokens)
        request = rule.begin("engine", elsewhere=elsewhere)

        def answer() -> None:
            rule.end(request, tokens)
            answers.append((now, now - began, elsewhere, tokens))
            if load.rate is None:
                arrive()

        def compute() -> None:
            at(station("model", load.model * scale), answer)

        def accept() -> None:
            at(station("front", load.read if elsewhere else load.front * scale), compute)

        at(station("render", load.render * scale) + load.move if elsewhere else now, accept)
        if load.rate is not None:
            at(now + draw.expovariate(load.rate(now - load.begins)), arrive)

    for _ in range(load.clients if load.rate is None else 1):
        at(now, arrive)
    while events[0][0] < load.begins + load.seconds:
        now, *_, what = heapq.heappop(events)
        what()
    late = [row for row in answers if row[0] > load.begins + load.seconds / 2]
    by_size = {size: [row[2] for row in late if row[3] == size] for size in load.sizes}
    ways = mean(row[2] for row in late), {size: mean(taken) for size, taken in by_size.items()}
    return Served(len(late) / load.seconds * 2, mean(row[1] for row in late), *ways)


@pytest.mark.parametrize("begins", [0.0, 100.0, 7.5 * PERIOD])  # in the periods of the engine, the renderer, and none
@pytest.mark.parametrize(
    ("load", "elsewhere"),
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
    load: Load, elsewhere: bool, begins: float
) -> None:
    share = serve(RULE, replace(load, begins=begins)).elsewhere
    assert share > 0.85 if elsewhere else share < 0.15


@given(
    st.floats(0.2, 2), st.floats(0.2, 2), st.floats(0.01, 1.5), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3, 8])
)
@settings(max_examples=30, deadline=None)
def test_closed_loops_are_served_nearly_as_fast_as_by_the_better_way_alone(
    front: float, render: float, model: float, renderers: int, clients: int
) -> None:
    load = Load(front=front, render=render, model=model, renderers=renderers, clients=clients)
    engine, renderer = serve(ENGINE, load).rate, serve(ELSEWHERE, load).rate
    assert serve(RULE, load).rate > 0.8 * max(engine, AUTO_GAIN * renderer)


@given(
    st.floats(0.2, 2),
    st.floats(0.2, 2),
    st.sampled_from([0.01, 0.1, 0.5]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([(TOKENS,), (600, 1000, 4000)]),
)
@example(front=1.7, render=1.0, move=0.1, prefills=8, clients=8, sizes=(600, 1000, 4000))
@example(front=0.5, render=2.0, move=0.01, prefills=8, clients=8, sizes=(600, 1000, 4000))
@settings(max_examples=30, deadline=None)
def test_prompts_are_served_nearly_as_fast_as_by_the_better_pool_alone(
    front: float, render: float, move: float, prefills: int, clients: int, sizes: tuple[int, ...]
) -> None:
    load = Load(front, render, move, 0.02, 0.0, prefills, sizes, clients=clients)
    assert serve(Offload, load).rate > 0.8 * max(serve(ENGINE, load).rate, serve(ELSEWHERE, load).rate)


@pytest.mark.parametrize("clients", [1, 2])
def test_a_fixed_cost_elsewhere_pays_off_for_long_requests(clients: int) -> None:
    """Alone, 1,000 tokens take 0.5 s here and 0.65 s elsewhere, 4,000 tokens 2 and 0.8 s."""
    load = Load(1.0, 0.1, 0.6, 0.0, 0.0, sizes=(600, 1000, 4000), clients=clients)
    for rule in (RULE, Offload):
        served = serve(rule, load)
        assert served.by_size[4000] > 0.85
        assert served.seconds < 1.05 * min(serve(fixed, load).seconds for fixed in (ENGINE, ELSEWHERE))
        assert clients > 1 or served.by_size[600] < 0.15


def test_prompts_go_to_prefill_engines_before_any_measurement() -> None:
    now = 0.0
    rule = Offload(lambda: now)
    while now < 8:
        assert rule.elsewhere(TOKENS)
        request = rule.begin("engine", elsewhere=True)
        now += 1
        rule.end(request, TOKENS)


def test_engines_that_become_overloaded_are_relieved() -> None:
    """Requests wait longer than a period before the other way is tried, so that none of its answers shows its cost."""
    load = Load(rate=lambda since: 0.2 if since < 1.25 * CYCLE * PERIOD else 1.5, seconds=8 * CYCLE * PERIOD)
    assert serve(ENGINE, load).seconds > 5 * PERIOD
    assert serve(RULE, load).seconds < 2 * serve(ELSEWHERE, load).seconds


def test_a_way_that_fails_costs_its_time() -> None:
    now, taken = 0.0, []
    rule = RULE(lambda: now)
    while now < CYCLE * PERIOD:
        elsewhere = rule.elsewhere(TOKENS)
        taken.append((now, elsewhere))
        request = rule.begin("engine", elsewhere=elsewhere)
        now += 0.7 if elsewhere else 1.0
        rule.end(request, 0 if elsewhere and len(taken) % 2 else TOKENS)
    assert any(elsewhere for _, elsewhere in taken)
    assert not any(elsewhere for when, elsewhere in taken if when > 2 * PERIOD)


def test_a_measured_minute_counts_each_engine_alone() -> None:
    """Two engines that work at once are not one that works twice as fast."""
    now = 0.0
    rule = RULE(lambda: now)
    while now < CYCLE * PERIOD - 10:
        elsewhere = rule.elsewhere(TOKENS)
        engines = ("one", "other") if not elsewhere else ("one",)
        requests = [rule.begin(engine, elsewhere=elsewhere) for engine in engines]
        now += 1.0 if not elsewhere else 0.8
        for request in requests:
            rule.end(request, TOKENS)
    assert rule.elsewhere(TOKENS)


@pytest.mark.parametrize("seconds", [0.8, 1.2])
def test_engines_that_answer_in_batches_are_compared(seconds: float) -> None:
    now = 0.0
    rule = WayComparison(1.0, lambda: now)
    while now < CYCLE * PERIOD - 10:
        elsewhere, sizes = rule.elsewhere(TOKENS), (4000, 600, 600)
        requests = [rule.begin("engine", elsewhere=elsewhere) for _ in sizes]
        now += seconds if elsewhere else 1.0
        for request, tokens in zip(requests, sizes, strict=True):
            rule.end(request, tokens)
    assert {rule.elsewhere(tokens) for tokens in (600, TOKENS, 4000)} == {seconds < 1}
