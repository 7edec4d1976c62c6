"""Whether an engine that answers does a part of the work itself, or another pool does, by the measured costs. Pure.

The other pool has renderers, which process images, or prefill engines, which compute prompts: *elsewhere* below.

The time of single answers misleads under load: while requests take both ways at once, each way relieves the other's
queue. So all requests of a period take one way, and its cost is the time in which an engine had requests of this way,
and no others, to answer. Per request that is the inverse of the throughput under load, and the time of an answer where
requests come one by one. A line through the times between answers divides it among long and short requests. Periods are
those of the wall clock: all frontends measure a way together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from mmrouter_router.core.linear_cost import Line, Rate

PERIOD: Final = 60.0  # seconds
CYCLE: Final = 8  # periods; the first one measures engines, the second one elsewhere, the others take the cheaper way
ENOUGH: Final = 16  # answers of a way before its cost counts
LEVEL: Final = Line(1.0, 0.0)  # where the times do not grow with the tokens, each request costs the same


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request without a first byte."""

    engine: str
    elsewhere: bool


@dataclass(slots=True)
class _Sample:
    """Answers of one way, and the seconds in which engines had only its requests to answer.

    ``uncounted``: requests that began since the last answer that counted. ``answered``: seconds until that answer.
    ``times``: seconds between answers, by tokens of the later one.
    """

    uncounted: int = 0
    tokens: int = 0
    seconds: float = 0.0
    answered: float = 0.0
    times: Rate = field(default_factory=lambda: Rate(LEVEL))

    @property
    def complete(self) -> bool:
        return self.times.measured >= ENOUGH

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens

    def cost(self, tokens: int) -> float:
        """Return the share of the seconds that falls to a request of so many tokens."""
        line, answers = self.times.line, self.times.measured
        whole = line.seconds(self.tokens, answers)  # 0 where most answers come in batches
        return self.seconds * line.seconds(tokens) / whole if whole else self.seconds / answers


@dataclass(slots=True)
class _Queue:
    """Requests without a first byte at one engine, by whether work is done elsewhere, and the last change.

    ``mixed``: answers to come of requests that waited beside one of the other way.
    """

    at: float
    period: int
    waiting: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    mixed: int = 0


class WayComparison:
    """Compares both ways to the engines of one pool. Tokens are those of the work: visual ones, or of the prompt."""

    def __init__(self, gain: float, clock: Callable[[], float]) -> None:
        """``gain``: share of the engine's cost that the other way's must stay below. ``clock``: the wall clock."""
        self._gain, self._clock = gain, clock
        self._period = -1
        self._way: bool | None = None
        self._samples = {way: _Sample() for way in (False, True)}
        self._last: dict[bool, _Sample | None] = {False: None, True: None}
        self._queues: dict[str, _Queue] = {}

    def elsewhere(self, tokens: int) -> bool:
        """Whether the work of the next request, of so many tokens, is done elsewhere."""
        measured, engine, other = self._measured(), self._known(False), self._known(True)
        if measured is not None and (not self._samples[measured].complete or engine is None or other is None):
            return measured
        return engine is not None and other is not None and other.cost(tokens) < self._gain * engine.cost(tokens)

    @property
    def costs(self) -> tuple[float | None, float | None]:
        """Seconds per token of the engine's way and of the other one, ``None`` where they are unknown."""
        engine, other = (sample.per_token if (sample := self._known(way)) else None for way in (False, True))
        return engine, other

    def begin(self, engine: str, *, elsewhere: bool) -> Waiting:
        """Add a request to an engine's queue, until :meth:`end`."""
        measured = self._measured()
        queue = self._queues.setdefault(engine, _Queue(self._clock(), self._period))
        self._advance(queue, measured)
        queue.waiting[elsewhere] += 1
        if queue.waiting[not elsewhere]:
            queue.mixed = sum(queue.waiting.values())
        if measured is elsewhere:
            self._samples[elsewhere].uncounted += 1
        return Waiting(engine, elsewhere)

    def end(self, request: Waiting, tokens: int) -> None:
        """Remove a request. ``tokens``: of its work, 0 where it failed."""
        measured, queue = self._measured(), self._queues[request.engine]
        if self._advance(queue, measured) and tokens:
            sample = self._samples[request.elsewhere]
            sample.tokens, sample.uncounted = sample.tokens + tokens, 0
            sample.times.observe(tokens, sample.seconds - sample.answered)
            sample.answered = sample.seconds
        queue.waiting[request.elsewhere] -= 1
        queue.mixed = max(0, queue.mixed - 1)
        if not any(queue.waiting.values()):
            del self._queues[request.engine]

    def _measured(self) -> bool | None:
        """Return the way that this period measures, ``None`` where it measures none."""
        period = int(self._clock() // PERIOD)
        if period != self._period:
            self._period = period
            for way, sample in self._samples.items():
                # A way whose answers all came behind the other way's queue is unknown, and taken until that is empty.
                if sample.complete or sample.uncounted >= ENOUGH:
                    self._last[way], self._samples[way] = sample if sample.complete else None, _Sample()
            unknown = [way for way, sample in self._last.items() if sample is None]
            if len(unknown) == 1:
                self._way = unknown[0]
            else:
                self._way = bool(period % 2) if unknown or period % CYCLE < 2 else None
        return self._way

    def _known(self, way: bool) -> _Sample | None:
        """Return the newest complete sample of a way."""
        sample = self._samples[way]
        return sample if sample.complete else self._last[way]

    def _advance(self, queue: _Queue, measured: bool | None) -> bool:
        """Count the time since a queue's last change; return whether it counts for the measured way."""
        now, same = self._clock(), queue.period == self._period
        counts = (
            same
            and measured is not None
            and not queue.mixed
            and queue.waiting[measured] > 0
            and not self._samples[measured].complete
        )
        if counts and measured is not None:
            self._samples[measured].seconds += max(0.0, now - queue.at)
        queue.at, queue.period = now, self._period
        return counts
