"""A run, and a comparison of two, as tables on a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmrouter_cli.bench.compare import SPREADS, described, lines
from mmrouter_cli.bench.measure import NEEDED
from mmrouter_cli.bench.types import Result

POINTS = ("mean", "p50", "p90", "p95", "p99", "max")
TOO_FEW = "- stands for a percentile of too few values: " + ", ".join(
    f"p{point} takes {count}" for point, count in NEEDED.items()
)
SLOW_CLIENT = 0.1
"""Share of the first token's median that the client's own timers may be late before it is said, and of a token's all:
later ones are read several at once."""


def show(console: Console, result: Result) -> None:
    """Print one run."""
    if rows := figures(result):
        table = Table(title=Text(title(result)))
        table.add_column("milliseconds")
        for heading in (*POINTS, "values"):
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        console.print(Text(title(result), style="bold"))
    for said in facts(result):
        _say(console, said)
    for kind, failure in result.failures.items():
        _say(console, f"{failure.count} failed: {kind}: {failure.first}", "red")
    for said in doubts(result):
        _say(console, said, "yellow")


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style), soft_wrap=True)


def figures(result: Result) -> list[list[str]]:
    """Return a row for everything that was timed: its name, its points in milliseconds, and how many values it has."""
    found = []
    for field, name in SPREADS.items():
        spread = getattr(result, field)
        if spread is not None:
            found.append([name, *(_milliseconds(getattr(spread, point)) for point in POINTS), f"{spread.count:,}"])
    return found


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"


def title(result: Result) -> str:
    """Return what was run where."""
    policy = f" by {result.policy}" if result.policy else ""
    return f"{result.model} at {result.url}{policy}, {result.began}"


def facts(result: Result) -> list[str]:
    """Return what holds of a run as a whole."""
    seconds = result.seconds
    found = [TOO_FEW] if any("-" in row for row in figures(result)) else []
    found += [described(result.load) + (f"; {result.left_out} longer ones left out" if result.left_out else "")]
    rates = [total / seconds for total in (result.answered, result.prompt_tokens, result.completion_tokens)]
    found.append(
        f"{result.answered} answered and {result.failed} failed in {seconds:.1f} s: {rates[0]:.2f} requests/s, "
        f"{rates[1]:,.0f} prompt and {rates[2]:,.0f} answer tokens/s"
    )
    if result.hit_ratio is None:
        found.append(f"hit ratio unknown: {result.hit_unknown}")
    else:
        found.append(f"hit ratio {result.hit_ratio:.1%}: prompt tokens from caches, as the endpoint reports them")
    routing = result.routing
    if routing is not None:
        events = f"events {routing.events}" + (f" ({routing.why})" if routing.why else "")
        known = ", ".join(f"{count} {name}" for name, count in routing.decisions.items())
        said = f"mmrouter: {events}"
        if known:
            said += f"; decisions: {known}"
        if routing.overlap is not None:
            said += f"; {routing.overlap:.1%} of the prompt tokens found cached before sending"
        if routing.workers:
            said += f"; {len(routing.workers)} engine{'s' * (len(routing.workers) > 1)}, the busiest with "
            said += f"{max(routing.workers.values()) / sum(routing.workers.values()):.0%} of the requests"
        found.append(said)
    return found


def doubts(result: Result) -> list[str]:
    """Return what makes a run worth less than it looks."""
    found = []
    if result.interrupted:
        found.append(f"interrupted: {result.unanswered} requests were under way, and not all were sent")
    if result.late_share:
        found.append(
            f"{result.late_share:.1%} of the requests by the clock went out more than 100 ms after they were due, "
            f"the latest {result.latest:.1f} s"
        )
    own = [SLOW_CLIENT * result.first_token.p50] if result.first_token is not None else []
    own += [result.per_token.p50] if result.per_token is not None else []
    if own and result.lag > min(own):
        found.append(f"this client's own timers were {1000 * result.lag:.1f} ms late (p99): its machine is busy")
    return found


def show_comparison(console: Console, first: Result, second: Result) -> None:
    """Print two runs side by side."""
    table = Table(title="second against first")
    table.add_column("figure")
    for heading in (*headings(first, second), "ratio"):
        table.add_column(heading, justify="right")
    for line in lines(first, second):
        change = line.change
        style = "" if change is None or not line.better else "green" if (change - 1) * line.better > 0 else "red"
        if change is not None and abs(change - 1) < 0.01:
            style = ""
        table.add_row(
            f"{line.name} ({line.unit})", _value(line.first), _value(line.second), Text(_ratio(change), style)
        )
    console.print(table)


def headings(first: Result, second: Result) -> list[str]:
    """Return what the columns of two runs are called: with their policies, where those were asked for."""
    named = zip(("first", "second"), (first.policy, second.policy), strict=True)
    return [name + (f", {policy}" if policy else "") for name, policy in named]


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}x"
