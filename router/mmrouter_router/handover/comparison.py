"""Whether a renderer or the engine processes the images of a pool's requests, by the measured cost of both ways. Pure.

The time of single answers misleads under load: while requests take both ways at once, each way relieves the other's
queue. So all requests of a period take one way, and its cost is the time per visual token in which an engine had
requests of this way, and no others, to answer. That is the inverse of the throughput under load, and the time of an
answer where requests come one by one. Periods are those of the wall clock: all frontends measure a way together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

PERIOD: Final = 60.0  # seconds
CYCLE: Final = 8  # periods; the first one measures engines, the second one renderers, the others take the cheaper way
ENOUGH: Final = 16  # answers of a way before its cost counts


@dataclass(slots=True)
class _Sample:
    """Answers of one way, and the seconds in which engines had only its requests to answer.

    ``uncounted``: requests that began since the last answer that counted.
    """

    uncounted: int = 0
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def cost(self) -> float | None:
        """Seconds per visual token, ``None`` before there are enough answers."""
        return self.seconds / self.tokens if self.answers >= ENOUGH else None


@dataclass(slots=True)
class _Queue:
    """Requests without a first byte at one engine, by whether a renderer processes them, and the last change.

    ``mixed``: answers to come of requests that waited beside one of the other way.
    """

    at: float
    period: int
    waiting: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    mixed: int = 0


class WayComparison:
    """Compares both ways to the engines of one pool."""

    def __init__(self, gain: float, clock: Callable[[], float]) -> None:
        """``gain``: share of the engine's cost that a renderer's must stay below. ``clock``: the wall clock."""
        self._gain, self._clock = gain, clock
        self._period = -1
        self._way: bool | None = None
        self._samples = {way: _Sample() for way in (False, True)}
        self._costs: dict[bool, float | None] = {False: None, True: None}
        self._queues: dict[str, _Queue] = {}

    def processes(self) -> bool:
        """Whether a renderer processes the next request."""
        measured, (engine, renderer) = self._measured(), self.costs
        if measured is not None and (self._samples[measured].cost is None or engine is None or renderer is None):
            return measured
        return engine is not None and renderer is not None and renderer < self._gain * engine

    @property
    def costs(self) -> tuple[float | None, float | None]:
        """Seconds per visual token of the engine's way and of the renderers', ``None`` where they are unknown."""
        return self._cost(False), self._cost(True)

    def begin(self, engine: str, *, processed: bool) -> None:
        """Add a request to an engine's queue."""
        measured = self._measured()
        queue = self._queues.setdefault(engine, _Queue(self._clock(), self._period))
        self._advance(queue, measured)
        queue.waiting[processed] += 1
        if queue.waiting[not processed]:
            queue.mixed = sum(queue.waiting.values())
        if measured is processed:
            self._samples[processed].uncounted += 1

    def end(self, engine: str, tokens: int, *, processed: bool) -> None:
        """Remove a request. ``tokens``: its visual ones, 0 where it failed."""
        measured, queue = self._measured(), self._queues[engine]
        if self._advance(queue, measured) and tokens:
            sample = self._samples[processed]
            sample.answers, sample.tokens, sample.uncounted = sample.answers + 1, sample.tokens + tokens, 0
        queue.waiting[processed] -= 1
        queue.mixed = max(0, queue.mixed - 1)
        if not any(queue.waiting.values()):
            del self._queues[engine]

    def _measured(self) -> bool | None:
        """Return the way that this period measures, ``None`` where it measures none."""
        period = int(self._clock() // PERIOD)
        if period != self._period:
            self._period = period
            for way, sample in self._samples.items():
                # A way whose answers all came behind the other way's queue is unknown, and taken until that is empty.
                if sample.cost is not None or sample.uncounted >= ENOUGH:
                    self._costs[way], self._samples[way] = sample.cost, _Sample()
            unknown = [way for way, cost in self._costs.items() if cost is None]
            if len(unknown) == 1:
                self._way = unknown[0]
            else:
                self._way = bool(period % 2) if unknown or period % CYCLE < 2 else None
        return self._way

    def _cost(self, way: bool) -> float | None:
        cost = self._samples[way].cost
        return self._costs[way] if cost is None else cost

    def _advance(self, queue: _Queue, measured: bool | None) -> bool:
        """Count the time since a queue's last change; return whether it counts for the measured way."""
        now, same = self._clock(), queue.period == self._period
        counts = (
            same
            and measured is not None
            and not queue.mixed
            and queue.waiting[measured] > 0
            and self._samples[measured].answers < ENOUGH
        )
        if counts and measured is not None:
            self._samples[measured].seconds += max(0.0, now - queue.at)
        queue.at, queue.period = now, self._period
        return counts
