"""Whether two runs can be compared, and their figures side by side. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from mmrouter_cli.bench.types import Load, Result, Spread

SAME_TOKENS = 0.05
"""Mean tokens of prompts and of answers may differ by so much of the larger one."""
SAME_FAILURES = 0.01
"""Shares of requests that failed may differ by so much, and"""
FEW_LATE = 0.01
"""so many requests may have gone out late."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of two runs. ``better``: the sign of a change for the better, 0 where there is none."""

    name: str
    unit: str
    better: int
    first: float | None
    second: float | None

    @property
    def change(self) -> float | None:
        """Second over first, ``None`` where there is no such ratio."""
        return self.second / self.first if self.first and self.second is not None else None


def objections(first: Result, second: Result) -> list[str]:
    """Return why these two must not be compared, a sentence each; empty where they can be."""
    found = [*_of_one("the first run", first), *_of_one("the second run", second)]
    a, b = msgspec.structs.asdict(first.load), msgspec.structs.asdict(second.load)
    differ = [f"{name} is {a[name]} and {b[name]}" for name in a if a[name] != b[name]]
    if differ:
        found.append("the loads differ: " + (differ[0] if first.load.kind != second.load.kind else ", ".join(differ)))
    if first.left_out != second.left_out:
        found.append(f"the loads differ: {first.left_out} and {second.left_out} requests were left out")
    if (first.url, first.salt) == (second.url, second.salt) and first != second:
        found.append(f"both sent the same words to {first.url} (salt {first.salt}): the later one found them in caches")
    if not found:
        for what, of in (("prompts", "prompt_tokens"), ("answers", "completion_tokens")):
            means = [getattr(result, of) / result.answered for result in (first, second)]
            if max(means) - min(means) > SAME_TOKENS * max(means):
                found.append(f"the loads differ: {what} have {means[0]:.0f} and {means[1]:.0f} tokens on average")
        shares = [result.failed / result.sent for result in (first, second)]
        if abs(shares[0] - shares[1]) > SAME_FAILURES:
            found.append(f"the loads differ: {shares[0]:.1%} and {shares[1]:.1%} of the requests failed")
    return found


def _of_one(name: str, result: Result) -> Iterator[str]:
    if result.interrupted:
        yield f"{name} was interrupted after {result.answered + result.failed} of {result.load.requests} requests"
    if not result.answered:
        yield f"{name} has no answer"
    elif result.hit_ratio is None:
        yield f"{name}'s hit ratio is unknown: {result.hit_unknown}"
    if result.routing is not None and result.routing.events != "on":
        state = "were off" if result.routing.events == "off" else "may have been off"
        yield f"{name}'s events {state}: {result.routing.why}"
    if result.late_share > FEW_LATE:
        share = f"{result.late_share:.1%} of its requests by the clock"
        yield f"{name} is not the load that was asked for: {share} went out late"


def lines(first: Result, second: Result) -> list[Line]:
    """Return the figures of two runs side by side."""
    both = (first, second)
    found = [
        Line(f"{name}, {point}", "ms", -1, *(_of(getattr(result, spread), point) for result in both))
        for spread, name in SPREADS.items()
        for point in ("p50", "p95", "p99")
    ]
    found.append(Line("hit ratio", "%", 1, *(_percent(result.hit_ratio) for result in both)))
    found.append(Line("requests per second", "/s", 1, *(result.answered / result.seconds for result in both)))
    found.append(Line("answer tokens per second", "/s", 1, *(r.completion_tokens / r.seconds for r in both)))
    found.append(Line("failed", "%", -1, *(_percent(result.failed / max(1, result.sent)) for result in both)))
    return found


SPREADS = {
    "first_token": "first token",
    "between_tokens": "between tokens",
    "per_token": "per token",
    "end_to_end": "end to end",
}


def _of(spread: Spread | None, point: str) -> float | None:
    seconds = getattr(spread, point, None)
    return None if seconds is None else 1000 * float(seconds)


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100 * ratio


def described(load: Load) -> str:
    """Return a load in words."""
    if load.concurrency is not None:
        when = f"{load.concurrency} conversation{'s' * (load.concurrency > 1)} at a time"
    else:
        when = f"{load.rate:g} requests per second" if load.rate else "when they were recorded"
    if load.kind == "mooncake":
        return f"{load.requests} requests of a recorded trace ({load.trace}), {when}"
    what = f"of {load.turns:g} turns on average, seed {load.seed}"
    if load.kind == "statistics":
        return f"{load.requests} requests drawn from statistics ({load.trace}), conversations {what}, {when}"
    return f"{load.requests} requests, conversations {what}, {load.image_share:.0%} with a picture, {when}"
