"""Figures of a run from its answers: percentiles, failures, hit ratio, lateness. Pure."""

import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mmrouter_cli.bench.types import Answer, AnswerRow, Failure, Spread

SAMPLE_SIZE = 500_000
"""Up to this many values percentiles are exact; of more, an even random sample of this size is kept."""
MOST_ROWS = 5_000
LATE_SECONDS = 0.1
"""Delay after its due time from which a request counts as late."""
VALUES_NEEDED = {90: 10, 95: 20, 99: 100}
"""Percentile -> number of values from which at least one lies above it."""


class Sample:
    """An even random sample of any number of values in bounded memory (Vitter's algorithm R)."""

    def __init__(self, size: int = SAMPLE_SIZE, seed: int = 0) -> None:
        self.values: list[float] = []
        self.seen = 0
        self._size, self._random = size, random.Random(seed)

    def add(self, value: float) -> None:
        """Take a value: the n-th one replaces a random earlier one with probability size / n."""
        self.seen += 1
        if len(self.values) < self._size:
            self.values.append(value)
        elif (index := self._random.randrange(self.seen)) < self._size:
            self.values[index] = value


@dataclass(slots=True)
class RunState:
    """State of a run in progress."""

    planned: int
    began: float
    sent: int = 0
    answers: list[Answer] = field(default_factory=list)
    gaps: Sample = field(default_factory=Sample)
    lags: Sample = field(default_factory=lambda: Sample(10_000))

    @property
    def in_flight(self) -> int:
        """Requests without an answer yet."""
        return self.sent - len(self.answers)


def quantiles(values: Sequence[float]) -> list[float]:
    """Return percentiles 0 to 100, linearly interpolated; empty without values."""
    if len(values) < 2:
        return list(values) * 101
    return [min(values), *statistics.quantiles(values, n=100, method="inclusive"), max(values)]


def spread(values: Sequence[float], count: int | None = None) -> Spread | None:
    """Return the distribution of values. ``count``: of all values, where these are a sample."""
    if not values:
        return None
    at = quantiles(values)
    p90, p95, p99 = (at[point] if len(values) >= needed else None for point, needed in VALUES_NEEDED.items())
    return Spread(count or len(values), statistics.fmean(values), at[50], p90, p95, p99, at[100])


def successes(answers: Iterable[Answer]) -> list[Answer]:
    """Return the complete answers."""
    return [answer for answer in answers if not answer.error]


def failures(answers: Iterable[Answer]) -> dict[str, Failure]:
    """Return the failures by kind, most frequent first."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for answer in answers:
        if answer.error:
            counts[answer.error] += 1
            first.setdefault(answer.error, answer.message)
    return {kind: Failure(count, first[kind]) for kind, count in counts.most_common()}


def per_token(answers: Iterable[Answer]) -> list[float]:
    """Return each answer's seconds per token after its first one; answers of one token have none."""
    return [(a.last - a.first) / (a.tokens - 1) for a in answers if a.tokens > 1 and a.tokens_seen > 1]


def hit_ratio(answers: Sequence[Answer]) -> tuple[float | None, str]:
    """Return the share of prompt tokens that came from caches, or ``None`` and the reason it is unknown."""
    if not answers:
        return None, "no request was answered"
    if any(answer.prompt is None for answer in answers):
        return None, "the endpoint reports no usage in its streams"
    if silent := sum(answer.cached is None for answer in answers):
        flags = "vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report"
        return None, f"{silent} of {len(answers)} answers have no prompt_tokens_details.cached_tokens ({flags})"
    total = sum(answer.prompt or 0 for answer in answers)
    return (sum(answer.cached or 0 for answer in answers) / total, "") if total else (None, "prompts have no tokens")


def overlap(answers: Sequence[Answer]) -> float | None:
    """Return the share of prompt tokens that an mmrouter found cached, ``None`` unless it reports all of them."""
    total = sum(answer.prompt or 0 for answer in answers)
    if not total or any(answer.overlap is None or answer.prompt is None for answer in answers):
        return None
    return sum(answer.overlap or 0 for answer in answers) / total


def lateness(answers: Iterable[Answer]) -> tuple[float, float]:
    """Return the share of requests with a due time that were sent late, and the largest delay in seconds."""
    late = [answer.late for answer in answers if answer.late is not None]
    return (sum(each > LATE_SECONDS for each in late) / len(late), max(late)) if late else (0.0, 0.0)


def rows(answers: Sequence[Answer], most: int = MOST_ROWS) -> list[AnswerRow]:
    """Return the answers for plots; of too many, evenly chosen ones."""
    step = max(1, -(-len(answers) // most))
    return [AnswerRow(a.started, a.first, a.total, a.prompt, a.cached) for a in answers[::step]]
