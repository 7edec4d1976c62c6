"""Discrete-event simulation of engines and a router, in virtual time and without randomness of its own.

A request reaches its engine at once. Changes of an engine's cache are published when its step ends, as vLLM does, and
reach the router :data:`FEED` later.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.cluster.routing_policies import Policy
from bench.cluster.virtual_engine import NEVER, EngineRequest, Machine, VirtualEngine
from bench.cluster.workloads import ClusterLoad

FEED: Final = 0.005
"""Seconds for which a sidecar collects changes before it sends them."""

_DELTA, _STEP, _REQUEST = range(3)
"""Kinds of events, in their order at equal times."""


@dataclass(slots=True)
class SimulationResult:
    """Seconds to the first token and cached tokens of the counted requests, and totals of the engines."""

    seconds: list[float] = field(default_factory=list)
    cached: int = 0
    tokens: int = 0
    encoded: int = 0
    preemptions: int = 0
    chosen: list[int] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        return self.cached / self.tokens


def simulate(
    load: ClusterLoad,
    engines: int,
    machine: Machine,
    policy: Policy,
    *,
    at_once: bool = False,
    watch: Callable[[float, Sequence[VirtualEngine]], None] | None = None,
) -> SimulationResult:
    """Run all requests to their end. ``at_once``: the policy learns every cache change when it happens. ``watch`` is
    called after every event. Raises ``RuntimeError`` if a request never ends.
    """
    fleet = [VirtualEngine(machine, load.block_size) for _ in range(engines)]
    result = SimulationResult()
    events: list[tuple[float, int, int, int]] = []  # time, kind, engine, payload
    deltas: list[tuple[list[bytes], list[bytes]]] = []
    versions = [0] * engines
    requests, count = load.requests, len(load.requests)
    unfinished, arrived = count, 0

    def publish(which: int, now: float) -> None:
        engine = fleet[which]
        stored, removed = engine.changes()
        if not stored and not removed:
            return
        if at_once:
            policy.cache_changed(which, stored, removed)
            return
        deltas.append((stored, removed))
        leaves = engine.first_due if engine.first_due != NEVER else now
        heapq.heappush(events, (leaves + FEED, _DELTA, which, len(deltas) - 1))

    def schedule_step(which: int) -> None:
        versions[which] += 1
        if fleet[which].due != NEVER:
            heapq.heappush(events, (fleet[which].due, _STEP, which, versions[which]))

    while unfinished:
        if arrived < count and (not events or (requests[arrived].at, _REQUEST) < events[0][:2]):
            request, number, now = requests[arrived], arrived, requests[arrived].at
            arrived += 1
            which = policy.choose(number, request, now)
            result.chosen.append(which)
            before = fleet[which].due
            fleet[which].add(EngineRequest(number, request.names, request.tokens, request.output, request.media), now)
            if fleet[which].due != before:
                schedule_step(which)
                publish(which, now)
        elif events:
            now, kind, which, what = heapq.heappop(events)
            if kind == _DELTA:
                policy.cache_changed(which, *deltas[what])
                deltas[what] = ([], [])
            elif what == versions[which]:
                progress = fleet[which].advance(now)
                schedule_step(which)
                publish(which, now)
                for sequence in progress.answered:
                    policy.answered(sequence.number)
                    request = requests[sequence.number]
                    if request.at >= load.counted_from:
                        result.seconds.append(now - request.at)
                        result.cached += sequence.cached or 0
                        result.tokens += request.tokens
                for sequence in progress.ended:
                    policy.ended(sequence.number)
                    unfinished -= 1
        else:
            raise RuntimeError(f"{unfinished} requests never ended")
        if watch is not None:
            watch(now, fleet)
    for _, kind, which, what in sorted(events):
        if kind == _DELTA:
            policy.cache_changed(which, *deltas[what])  # deliver the rest
    result.encoded = sum(engine.encoded_tokens for engine in fleet)
    result.preemptions = sum(engine.preemptions for engine in fleet)
    return result
