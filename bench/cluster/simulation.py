"""Engines, a router and its requests in virtual time: no clock, no luck but what is drawn from seeds.

A request reaches its engine at once. What an engine tells of its cache leaves it when its step ends, as vLLM publishes
it, and reaches the router :data:`FEED` later.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.cluster.routing_policies import Policy
from bench.cluster.virtual_engine import NEVER, Engine, Machine, Running
from bench.cluster.workloads import Load

FEED: Final = 0.005
"""Seconds that a sidecar collects changes for before it sends them."""

_TOLD, _STEP, _ASKED = range(3)
"""Kinds of events, in the order in which those of one time happen."""


@dataclass(slots=True)
class Run:
    """What one policy gave: seconds to first tokens and cached tokens of the requests that count, and the engines."""

    seconds: list[float] = field(default_factory=list)
    cached: int = 0
    tokens: int = 0
    end: float = 0.0
    busy: float = 0.0  # share of time that an engine had a step under way, while requests came
    encoded: int = 0
    preemptions: int = 0
    chosen: list[int] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that came from a cache."""
        return self.cached / self.tokens


def simulate(
    load: Load,
    engines: int,
    machine: Machine,
    policy: Policy,
    *,
    at_once: bool = False,
    watch: Callable[[float, Sequence[Engine]], None] | None = None,
) -> Run:
    """Run all requests to their end. ``at_once``: the policy knows every change of a cache when it happens.

    ``watch`` is called after every event. Raises ``RuntimeError`` if a request is lost.
    """
    fleet = [Engine(machine, load.block_size) for _ in range(engines)]
    run = Run()
    events: list[tuple[float, int, int, int]] = []  # time, kind, engine, what
    letters: list[tuple[list[bytes], list[bytes]]] = []
    versions = [0] * engines
    asks, count = load.asks, len(load.asks)
    open_, coming = count, 0

    def tell(which: int, now: float) -> None:
        engine = fleet[which]
        if not policy.listens:
            engine.changes()
            return
        stored, removed = engine.changes()
        if not stored and not removed:
            return
        if at_once:
            policy.told(which, stored, removed)
            return
        letters.append((stored, removed))
        leaves = engine.first_due if engine.first_due != NEVER else now
        heapq.heappush(events, (leaves + FEED, _TOLD, which, len(letters) - 1))

    def plan(which: int) -> None:
        versions[which] += 1
        if fleet[which].due != NEVER:
            heapq.heappush(events, (fleet[which].due, _STEP, which, versions[which]))

    while open_:
        if coming < count and (not events or (asks[coming].at, _ASKED) < events[0][:2]):
            ask, number, now = asks[coming], coming, asks[coming].at
            coming += 1
            which = policy.choose(number, ask, now)
            run.chosen.append(which)
            before = fleet[which].due
            fleet[which].add(Running(number, ask.names, ask.tokens, ask.output, ask.media), now)
            if fleet[which].due != before:
                plan(which)
                tell(which, now)
        elif events:
            now, kind, which, what = heapq.heappop(events)
            if kind == _TOLD:
                policy.told(which, *letters[what])
                letters[what] = ([], [])
            elif what == versions[which]:
                news = fleet[which].advance(now)
                plan(which)
                tell(which, now)
                for sequence in news.answered:
                    policy.answered(sequence.number)
                    ask = asks[sequence.number]
                    if ask.at >= load.counted_from:
                        run.seconds.append(now - ask.at)
                        run.cached += sequence.cached or 0
                        run.tokens += ask.tokens
                for sequence in news.ended:
                    policy.ended(sequence.number)
                    open_ -= 1
        else:
            raise RuntimeError(f"{open_} requests never ended")
        if coming == count and not run.busy:
            run.busy = sum(engine.busy for engine in fleet) / (now * engines)
        if watch is not None:
            watch(now, fleet)
    for _, kind, which, what in sorted(events):
        if kind == _TOLD:
            policy.told(which, *letters[what])  # what was on its way
    run.end = now
    run.encoded = sum(engine.encoded_tokens for engine in fleet)
    run.preemptions = sum(engine.preemptions for engine in fleet)
    return run
