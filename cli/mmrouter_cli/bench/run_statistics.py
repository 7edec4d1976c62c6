"""Figures of a run from its answers: percentiles, failures, hit ratio, lateness; and two runs side by side. Pure."""

import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from mmrouter_cli.bench.types import Answer, AnswerRow, Failure, LoadSpec, Result, Spread

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
    planned: int
    began: float
    sent: int = 0
    answers: list[Answer] = field(default_factory=list)
    gaps: Sample = field(default_factory=Sample)
    lags: Sample = field(default_factory=lambda: Sample(10_000))

    @property
    def in_flight(self) -> int:
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


TOKEN_TOLERANCE = 0.05
"""Largest relative difference of the mean tokens of prompts and of answers."""
FAILURE_TOLERANCE = 0.01
"""Largest difference of the shares of failed requests."""
LATE_TOLERANCE = 0.01
"""Largest share of requests that were sent late."""
NOTICEABLE = 0.01
"""Relative change from which a figure is marked as better or worse."""
SPREADS = {
    "first_token": "first token",
    "between_tokens": "between tokens",
    "per_token": "per token",
    "end_to_end": "end to end",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of two runs. ``better``: the sign of an improvement."""

    name: str
    unit: str
    better: int
    first: float | None
    second: float | None

    @property
    def change(self) -> float | None:
        """Second over first, ``None`` without such a ratio."""
        return self.second / self.first if self.first and self.second is not None else None

    @property
    def judgement(self) -> Literal["", "better", "worse"]:
        _, first, second, _ = self.texts()
        if self.change is None or abs(self.change - 1) < NOTICEABLE or first == second:
            return ""
        return "better" if (self.change - 1) * self.better > 0 else "worse"

    def texts(self) -> tuple[str, str, str, str]:
        first, second = ("-" if value is None else f"{value:,.2f}" for value in (self.first, self.second))
        return f"{self.name} ({self.unit})", first, second, "-" if self.change is None else f"{self.change:.3f}x"


def verdict(compared: Sequence[Line]) -> str:
    """Return the comparison of two runs in a sentence."""
    found = {kind: [line.name for line in compared if line.judgement == kind] for kind in ("better", "worse")}
    parts = [f"{kind} in {len(names)} ({', '.join(names)})" for kind, names in found.items() if names]
    if not parts:
        return f"The two runs are equal in all {len(compared)} figures."
    return f"Of {len(compared)} figures the second run is {' and '.join(parts)}."


def by_mode(results: Sequence[Result]) -> bool:
    """Whether the runs are of different encoder modes, and so shown side by side and not compared."""
    modes = {result.encoder_mode for result in results}
    return "" not in modes and len(modes) == len(results)


def objections(first: Result, second: Result) -> list[str]:
    """Return why two runs are not comparable, a sentence each; empty where they are."""
    reasons = [*_of_run("the first run", first), *_of_run("the second run", second)]
    a, b = msgspec.structs.asdict(first.load), msgspec.structs.asdict(second.load)
    differ = [f"{name} is {a[name]} and {b[name]}" for name in a if a[name] != b[name]]
    if differ:
        reasons.append("the loads differ: " + (differ[0] if first.load.kind != second.load.kind else ", ".join(differ)))
    if first.left_out != second.left_out:
        reasons.append(f"the loads differ: {first.left_out} and {second.left_out} requests were left out")
    if (first.url, first.salt) == (second.url, second.salt) and first != second:
        reasons.append(f"both sent the same words to {first.url} (salt {first.salt}): the later one found them cached")
    if not reasons:
        for name, field in (("prompts", "prompt_tokens"), ("answers", "completion_tokens")):
            means = [getattr(result, field) / result.answered for result in (first, second)]
            if max(means) - min(means) > TOKEN_TOLERANCE * max(means):
                reasons.append(f"the loads differ: {name} have {means[0]:.0f} and {means[1]:.0f} tokens on average")
        shares = [result.failed / result.sent for result in (first, second)]
        if abs(shares[0] - shares[1]) > FAILURE_TOLERANCE:
            reasons.append(f"the loads differ: {shares[0]:.1%} and {shares[1]:.1%} of the requests failed")
    return reasons


def _of_run(name: str, result: Result) -> Iterator[str]:
    if result.interrupted:
        yield f"{name} was interrupted after {result.answered + result.failed} of {result.load.requests} requests"
    if not result.answered:
        yield f"{name} has no answer"
    elif result.hit_ratio is None:
        yield f"{name}'s hit ratio is unknown: {result.hit_unknown}"
    if result.routing is not None and result.routing.events != "on":
        state = "were off" if result.routing.events == "off" else "may have been off"
        yield f"{name}'s events {state}: {result.routing.why}"
    if result.late_share > LATE_TOLERANCE:
        yield f"{name} did not send its load: {result.late_share:.1%} of its scheduled requests went out late"


def lines(first: Result, second: Result) -> list[Line]:
    both = (first, second)
    return [
        *(
            Line(f"{name}, {point}", "ms", -1, *(_milliseconds(getattr(result, spread), point) for result in both))
            for spread, name in SPREADS.items()
            for point in ("p50", "p95", "p99")
        ),
        Line("hit ratio", "%", 1, *(_percent(result.hit_ratio) for result in both)),
        Line("requests per second", "/s", 1, *(result.answered / result.seconds for result in both)),
        Line("answer tokens per second", "/s", 1, *(result.completion_tokens / result.seconds for result in both)),
        Line("failed", "%", -1, *(_percent(result.failed / max(1, result.sent)) for result in both)),
    ]


def _milliseconds(spread: Spread | None, point: str) -> float | None:
    seconds = getattr(spread, point, None)
    return None if seconds is None else 1000 * float(seconds)


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100 * ratio


def describe(load: LoadSpec) -> str:
    if load.concurrency is not None:
        when = f"{load.concurrency} conversation{'s' * (load.concurrency > 1)} at a time"
    else:
        when = f"{load.rate:g} requests per second" if load.rate else "when they were recorded"
    if load.kind == "mooncake":
        return f"{load.requests} requests of a recorded trace ({load.trace}), {when}"
    turns = f"of {load.turns:g} turns on average, seed {load.seed}"
    if load.kind == "statistics":
        return f"{load.requests} requests drawn from statistics ({load.trace}), conversations {turns}, {when}"
    return f"{load.requests} requests, conversations {turns}, {load.image_share:.0%} with a picture, {when}"
