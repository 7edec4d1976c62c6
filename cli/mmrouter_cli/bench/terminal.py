"""A run on a terminal: progress while it goes on, then its figures, or two runs compared, as tables."""

import asyncio
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mmrouter_cli.bench.http_client import clock
from mmrouter_cli.bench.run_statistics import SPREADS, VALUES_NEEDED, RunState, by_mode, describe, lines, verdict
from mmrouter_cli.bench.types import Result
from mmrouter_cli.options import table

DRAW_SECONDS, PRINT_SECONDS = 0.5, 5.0
"""Interval of progress on a terminal and elsewhere."""
RECENT = 500
"""Number of the latest answers that progress figures are of."""
POINTS = ("mean", "p50", "p90", "p95", "p99", "max")
TOO_FEW = "- stands for a percentile of too few values: " + ", ".join(
    f"p{point} takes {count}" for point, count in VALUES_NEEDED.items()
)
SLOW_CLIENT = 0.1
"""Share of the first token's median by which the client's timers may be late without a warning."""
MODE_COLUMNS = (
    *("mode", "requests/s", "answer tokens/s", "first token: mean ms", "p50 ms", "p95 ms", "per token: mean ms"),
    *("failed", "encoders"),
)
STYLES = {"": "", "better": "green", "worse": "red"}


async def follow(console: Console, state: RunState, url: str) -> None:
    """Show the progress of a run until cancelled, and once more at its end."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(PRINT_SECONDS)
            console.print(progress_line(state, url), soft_wrap=True)
    with Live(console=console, auto_refresh=False) as screen:
        try:
            while True:
                screen.update(progress_line(state, url), refresh=True)
                await asyncio.sleep(DRAW_SECONDS)
        finally:
            screen.update(progress_line(state, url), refresh=True)


def progress_line(state: RunState, url: str) -> Text:
    latest = state.answers[-RECENT:]
    answered = [answer for answer in latest if not answer.error]
    rate = len(state.answers) / max(1e-9, clock() - state.began)
    line = f"{len(state.answers)} of {state.planned} at {url}, {state.in_flight} in flight, {rate:.3g}/s"
    if answered:
        line += f"; first token {statistics.median(answer.first for answer in answered) * 1000:.0f} ms"
        prompt = sum(answer.prompt or 0 for answer in answered if answer.cached is not None)
        if prompt:
            line += f", cached {sum(answer.cached or 0 for answer in answered) / prompt:.0%}"
    text = Text(line, style="dim")
    if failed := len(latest) - len(answered):
        text.append(f"; {failed} of the last {len(latest)} failed", style="red")
    return text


def show(console: Console, result: Result) -> None:
    if rows := figures(result):
        numbers = (*POINTS, "values")
        shown = table(Text(title(result)), "milliseconds", *numbers, right=numbers)
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
    else:
        console.print(Text(title(result), style="bold"))
    for fact in facts(result):
        console.print(Text(fact), soft_wrap=True)
    for kind, failure in result.failures.items():
        console.print(Text(f"{failure.count} failed: {kind}: {failure.first}", "red"), soft_wrap=True)
    for doubt in doubts(result):
        console.print(Text(doubt, "yellow"), soft_wrap=True)


def show_comparison(console: Console, first: Result, second: Result) -> None:
    numbers = (*headings(first, second), "ratio")
    shown = table("second against first", "figure", *numbers, right=numbers)
    for line in lines(first, second):
        *texts, ratio = line.texts()
        shown.add_row(*texts, Text(ratio, STYLES[line.judgement]))
    console.print(shown)
    console.print(Text(verdict(lines(first, second))), soft_wrap=True)


def show_modes(console: Console, results: Sequence[Result]) -> None:
    """Show runs by several encoder modes side by side: throughput, times, and each encoder's share of the run."""
    shown = table("encoder modes", *MODE_COLUMNS, right=MODE_COLUMNS[1:-1])
    for result in results:
        first, each = result.first_token, result.per_token
        times = (first.mean, first.p50, first.p95) if first is not None else (None, None, None)
        work = (f"{name}: {e.images} images, busy {e.busy:.0%}" for name, e in sorted(result.encoders.items()))
        shown.add_row(
            result.encoder_mode,
            *(f"{n / result.seconds:,.2f}" for n in (result.answered, result.completion_tokens)),
            *("-" if time is None else f"{1000 * time:,.0f}" for time in (*times, each.mean if each else None)),
            str(result.failed),
            "\n".join(work),
        )
    console.print(shown)


def figures(result: Result) -> list[list[str]]:
    """Return a row per timed figure: its name, its points in milliseconds, and its number of values."""
    rows = []
    for field, name in SPREADS.items():
        if (spread := getattr(result, field)) is not None:
            values = (getattr(spread, point) for point in POINTS)
            rows.append(
                [name, *("-" if value is None else f"{1000 * value:,.1f}" for value in values), f"{spread.count:,}"]
            )
    return rows


def title(result: Result) -> str:
    policy = f" by {result.policy}" if result.policy else ""
    mode = f" with encoder mode {result.encoder_mode}" if result.encoder_mode else ""
    return f"{result.model} at {result.url}{policy}{mode}, {result.began}"


def headings(*results: Result) -> list[str]:
    """Return the headings of several runs: their encoder modes, or the number of each, with its policy where given."""
    if by_mode(results):
        return [result.encoder_mode for result in results]
    named = zip(("first", "second"), (result.policy for result in results), strict=False)
    return [name + (f", {policy}" if policy else "") for name, policy in named]


def facts(result: Result) -> list[str]:
    sentences = [TOO_FEW] if any("-" in row for row in figures(result)) else []
    sentences += [describe(result.load) + (f"; {result.left_out} longer ones left out" if result.left_out else "")]
    rates = [n / result.seconds for n in (result.answered, result.prompt_tokens, result.completion_tokens)]
    sentences.append(
        f"{result.answered} answered and {result.failed} failed in {result.seconds:.1f} s: {rates[0]:.2f} requests/s, "
        f"{rates[1]:,.0f} prompt and {rates[2]:,.0f} answer tokens/s"
    )
    if result.hit_ratio is None:
        sentences.append(f"hit ratio unknown: {result.hit_unknown}")
    else:
        sentences.append(f"hit ratio {result.hit_ratio:.1%}: prompt tokens from caches, as the endpoint reports them")
    if (routing := result.routing) is not None:
        parts = [f"mmrouter: events {routing.events}" + (f" ({routing.why})" if routing.why else "")]
        if routing.decisions:
            parts.append("decisions: " + ", ".join(f"{count} {name}" for name, count in routing.decisions.items()))
        if routing.overlap is not None:
            parts.append(f"{routing.overlap:.1%} of the prompt tokens found cached before sending")
        if routing.workers:
            busiest = max(routing.workers.values()) / sum(routing.workers.values())
            engines = f"{len(routing.workers)} engine{'s' * (len(routing.workers) > 1)}"
            parts.append(f"{engines}, the busiest with {busiest:.0%} of the requests")
        sentences.append("; ".join(parts))
    return sentences


def doubts(result: Result) -> list[str]:
    """Return sentences on what makes the figures less reliable."""
    sentences = []
    if result.interrupted:
        sentences.append(f"interrupted: {result.unanswered} requests were in flight, and not all were sent")
    if result.late_share:
        sentences.append(
            f"{result.late_share:.1%} of the scheduled requests went out more than 100 ms after they were due, "
            f"the latest {result.latest:.1f} s"
        )
    bounds = [SLOW_CLIENT * result.first_token.p50] if result.first_token is not None else []
    bounds += [result.per_token.p50] if result.per_token is not None else []
    if bounds and result.lag > min(bounds):
        sentences.append(f"this client's own timers were {1000 * result.lag:.1f} ms late (p99): its machine is busy")
    return sentences
