"""Whether two runs are comparable, and their figures side by side. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from mmrouter_cli.bench.types import LoadSpec, Result, Spread

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
        """Whether the second run is noticeably better or worse."""
        if self.change is None or abs(self.change - 1) < NOTICEABLE:
            return ""
        return "better" if (self.change - 1) * self.better > 0 else "worse"

    def texts(self) -> tuple[str, str, str, str]:
        """Return name with unit, both values, and the ratio."""
        first, second = ("-" if value is None else f"{value:,.2f}" for value in (self.first, self.second))
        return f"{self.name} ({self.unit})", first, second, "-" if self.change is None else f"{self.change:.3f}x"


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
    """Return the figures of two runs side by side."""
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
    """Return a load in words."""
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
