"""Answers to figures. Pure."""

import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from mmrouter_cli.bench.types import Answer, Failure, Row, Spread

KEPT = 500_000
"""Values of which percentiles are exact; of more an even random sample of so many is kept."""
ROWS = 5_000
"""Answers that a result file names one by one."""
LATE_SECONDS = 0.1
"""A request that goes out so much later than it was due is not the load that was asked for."""
HUNDREDTHS = 100
NEEDED = {90: 10, 95: 20, 99: 100}
"""Values that a percentile takes: so many that at least one lies above it. With fewer it would be drawn out of two."""


class Sample:
    """Values of any number in bounded memory: all of the first ``room``, then an even random choice among all.

    (Vitter's algorithm R: the n-th value takes a random place with chance room / n.)
    """

    def __init__(self, room: int = KEPT, seed: int = 0) -> None:
        self.values: list[float] = []
        self.seen = 0
        self._room, self._random = room, random.Random(seed)

    def add(self, value: float) -> None:
        """Take one more value."""
        self.seen += 1
        if len(self.values) < self._room:
            self.values.append(value)
        elif (place := self._random.randrange(self.seen)) < self._room:
            self.values[place] = value


def quantiles(values: Sequence[float]) -> list[float]:
    """Return the 0th, 1st, .. 100th percentile, between two values by their distance; empty without values."""
    if not values:
        return []
    if len(values) == 1:
        return [values[0]] * (HUNDREDTHS + 1)
    return [min(values), *statistics.quantiles(values, n=HUNDREDTHS, method="inclusive"), max(values)]


def spread(values: Sequence[float], count: int | None = None) -> Spread | None:
    """Return how values lie, ``None`` without any. ``count``: of all, where these are a sample."""
    if not values:
        return None
    at = quantiles(values)
    p90, p95, p99 = (at[point] if len(values) >= needed else None for point, needed in NEEDED.items())
    return Spread(count or len(values), statistics.fmean(values), at[50], p90, p95, p99, at[100])


def whole(answers: Iterable[Answer]) -> list[Answer]:
    """Return the answers that are no errors."""
    return [answer for answer in answers if not answer.error]


def failures(answers: Iterable[Answer]) -> dict[str, Failure]:
    """Return the errors by kind, most frequent first, with what the first of each said."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for answer in answers:
        if answer.error:
            counts[answer.error] += 1
            first.setdefault(answer.error, answer.message)
    return {kind: Failure(count, first[kind]) for kind, count in counts.most_common()}


def per_token(answers: Iterable[Answer]) -> list[float]:
    """Return each answer's seconds per token after its first one; answers of one token have none."""
    found = []
    for answer in answers:
        tokens = answer.completion if answer.completion is not None else answer.tokens_seen
        if tokens > 1 and answer.tokens_seen > 1:
            found.append((answer.last - answer.first) / (tokens - 1))
    return found


def hit_ratio(answers: Sequence[Answer]) -> tuple[float | None, str]:
    """Return the share of prompt tokens that came from caches, or ``None`` and why nobody can say."""
    if not answers:
        return None, "no request was answered"
    if any(answer.prompt is None for answer in answers):
        return None, "the endpoint reports no usage in its streams"
    silent = sum(answer.cached is None for answer in answers)
    if silent:
        flags = "vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report"
        return None, f"{silent} of {len(answers)} answers have no prompt_tokens_details.cached_tokens ({flags})"
    total = sum(answer.prompt or 0 for answer in answers)
    return (sum(answer.cached or 0 for answer in answers) / total, "") if total else (None, "prompts have no tokens")


def overlap(answers: Sequence[Answer]) -> float | None:
    """Return the share of prompt tokens that an mmrouter found cached, ``None`` where it does not say for all."""
    known = [answer for answer in answers if answer.overlap is not None and answer.prompt is not None]
    total = sum(answer.prompt or 0 for answer in known)
    return sum(answer.overlap or 0 for answer in known) / total if total and len(known) == len(answers) else None


def lateness(answers: Iterable[Answer]) -> tuple[float, float]:
    """Return which share of the requests that were due at a time went out late, and the most seconds of any."""
    late = [answer.late for answer in answers if answer.late is not None]
    return (sum(each > LATE_SECONDS for each in late) / len(late), max(late)) if late else (0.0, 0.0)


def rows(answers: Sequence[Answer], most: int = ROWS) -> list[Row]:
    """Return the answers for plots; of too many, evenly chosen ones."""
    step = max(1, -(-len(answers) // most))
    return [Row(a.started, a.first, a.total, a.prompt, a.cached) for a in answers[::step]]
