"""Figures of a run from its answers: percentiles, failures, hit ratio, lateness; and two runs side by side. Pure."""

import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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


Interval = tuple[float, float]
"""Within which a figure would lie 95 times of 100 if its run were repeated."""
Noise = Callable[[Result], Interval | None]


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
    return [seconds for answer in answers if (seconds := answer.per_token) is not None]


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


def rows(answers: Sequence[Answer]) -> list[AnswerRow]:
    """Return the answers for plots; of too many, evenly chosen ones."""
    step = max(1, -(-len(answers) // MOST_ROWS))
    return [
        AnswerRow(a.started, a.first, a.total, a.prompt, a.cached, a.per_token, a.worker, a.images)
        for a in answers[::step]
    ]


TOKEN_TOLERANCE = 0.05
"""Largest relative difference of the mean tokens of prompts and of answers."""
FAILURE_TOLERANCE = 0.01
"""Largest difference of the shares of failed requests."""
LATE_TOLERANCE = 0.01
"""Largest share of requests that were sent late."""
NOTICEABLE = 0.01
"""Relative change from which a figure is marked as better or worse, where its noise is not known."""
DEVIATIONS = 1.96
"""Standard deviations to both sides of a figure within which it lies 95 times of 100."""
SPREADS = {
    "first_token": "first token",
    "between_tokens": "between tokens",
    "per_token": "per token",
    "end_to_end": "end to end",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of two runs. ``better``: the sign of an improvement. ``noise``: the interval of each, if known."""

    name: str
    unit: str
    better: int
    first: float | None
    second: float | None
    noise: tuple[Interval | None, Interval | None] = (None, None)

    @property
    def change(self) -> float | None:
        """Second over first, ``None`` without such a ratio."""
        return self.second / self.first if self.first and self.second is not None else None

    @property
    def judgement(self) -> Literal["", "better", "worse"]:
        _, first, second, _ = self.texts()
        if self.change is None or abs(self.change - 1) < NOTICEABLE or first == second or self.is_noise:
            return ""
        return "better" if (self.change - 1) * self.better > 0 else "worse"

    @property
    def is_noise(self) -> bool:
        """Whether the intervals of both runs overlap."""
        first, second = self.noise
        return first is not None and second is not None and first[0] <= second[1] and second[0] <= first[1]

    def texts(self) -> tuple[str, str, str, str]:
        first, second = ("-" if value is None else f"{value:,.2f}" for value in (self.first, self.second))
        return f"{self.name} ({self.unit})", first, second, "-" if self.change is None else f"{self.change:.3f}x"


def verdict(compared: Sequence[Line]) -> str:
    """Return the comparison of two runs in a sentence."""
    judged = {kind: [line.name for line in compared if line.judgement == kind] for kind in ("better", "worse")}
    parts = [f"{kind} in {len(names)} ({'; '.join(names)})" for kind, names in judged.items() if names]
    if not parts:
        return f"The two runs do not differ by more than their noise in any of {len(compared)} figures."
    return f"Of {len(compared)} figures the second run is {' and '.join(parts)}."


def summary(result: Result) -> str:
    """Return a run in a sentence."""
    sentence = f"{result.answered:,} of {result.answered + result.failed:,} requests were answered"
    sentence += f" at {result.answered / result.seconds:.2f} per second"
    if result.first_token is not None:
        sentence += f"; half of them began within {1000 * result.first_token.p50:,.0f} ms"
    if result.hit_ratio is not None:
        sentence += f", and {result.hit_ratio:.1%} of the prompt tokens came from caches"
    return f"{sentence}."


@dataclass(frozen=True, slots=True)
class Group:
    """The answers of a run that one worker gave, or that had, or had not, a picture. Times in seconds."""

    name: str
    requests: int
    share: float  # of all answers
    p50: float
    p95: float | None
    hit_ratio: float | None


def groups(result: Result) -> dict[str, list[Group]]:
    """Return a run's answers by worker and by image, as far as the result says which they were."""
    by_worker, by_image = defaultdict[str, list[AnswerRow]](list), defaultdict[str, list[AnswerRow]](list)
    for row in result.rows:
        by_worker[row.worker].append(row)
        if row.images is not None:
            by_image["with a picture" if row.images else "without a picture"].append(row)
    by_worker.pop("", None)
    groups = {"worker": by_worker, "image": by_image}
    return {
        kind: [_group(name, members, len(result.rows)) for name, members in sorted(rows.items())]
        for kind, rows in groups.items()
        if rows
    }


def _group(name: str, rows: Sequence[AnswerRow], of: int) -> Group:
    times = spread([row.first for row in rows])
    assert times is not None
    known = [row for row in rows if row.cached is not None]
    tokens = sum(row.prompt or 0 for row in known)
    cached = sum(row.cached or 0 for row in known) / tokens if tokens else None
    return Group(name, len(rows), len(rows) / of, times.p50, times.p95, cached)


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

    def line(name: str, unit: str, better: int, value: Callable[[Result], float | None], noise: Noise) -> Line:
        return Line(name, unit, better, value(first), value(second), (noise(first), noise(second)))

    return [
        *(
            Line(
                f"{name}, {point}",
                "ms",
                -1,
                _milliseconds(getattr(first, spread), point),
                _milliseconds(getattr(second, spread), point),
                (_percentile_noise(first, spread, point), _percentile_noise(second, spread, point)),
            )
            for spread, name in SPREADS.items()
            for point in ("p50", "p95", "p99")
        ),
        line("hit ratio", "%", 1, lambda result: _percent(result.hit_ratio), _hit_noise),
        _rate("requests per second", *((result, result.answered) for result in both)),
        _rate("answer tokens per second", *((result, result.completion_tokens) for result in both)),
        line("failed", "%", -1, lambda result: _percent(result.failed / max(1, result.sent)), _failure_noise),
    ]


def _percentile_noise(result: Result, spread: str, point: str) -> Interval | None:
    """Return the interval of a percentile in milliseconds: between the values whose ranks are a deviation away.

    Answers count, and not times between tokens: those of one answer depend on each other.
    """
    columns = {"first_token": "first", "per_token": "per_token", "end_to_end": "total"}
    values = [getattr(row, columns[spread]) for row in result.rows] if spread in columns else []
    at = quantiles([value for value in values if value is not None]) if spread in columns else result.gaps
    if not at or not result.answered:
        return None
    share = int(point[1:]) / 100
    deviation = DEVIATIONS * math.sqrt(share * (1 - share) / result.answered)
    low, high = max(0.0, share - deviation), min(1.0, share + deviation)
    return 1000 * at[math.floor(100 * low)], 1000 * at[math.ceil(100 * high)]


def _hit_noise(result: Result) -> Interval | None:
    """Return the interval of a hit ratio, a ratio of two sums over answers, in percent."""
    known = [row for row in result.rows if row.cached is not None]
    total, ratio = sum(row.prompt or 0 for row in known), result.hit_ratio
    if ratio is None or not total:
        return None
    deviation = (
        DEVIATIONS * math.sqrt(sum(((row.cached or 0) - ratio * (row.prompt or 0)) ** 2 for row in known)) / total
    )
    return 100 * (ratio - deviation), 100 * (ratio + deviation)


def _rate(name: str, *counted: tuple[Result, int]) -> Line:
    """Return a line of throughputs, which vary as the mean duration of an answer does."""
    values = [count / result.seconds for result, count in counted]
    intervals: list[Interval | None] = []
    for value, (result, _) in zip(values, counted, strict=True):
        times = [row.total for row in result.rows]
        if len(times) < 2:
            intervals.append(None)
            continue
        deviation = DEVIATIONS * statistics.stdev(times) / statistics.fmean(times) / math.sqrt(result.answered)
        intervals.append((value * (1 - deviation), value * (1 + deviation)))
    return Line(name, "/s", 1, values[0], values[1], (intervals[0], intervals[1]))


def _failure_noise(result: Result) -> Interval:
    share = result.failed / max(1, result.sent)
    deviation = DEVIATIONS * math.sqrt(share * (1 - share) / max(1, result.sent))
    return 100 * (share - deviation), 100 * (share + deviation)


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
