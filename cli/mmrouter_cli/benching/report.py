"""A run, and a comparison of two, as tables on a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmrouter_cli.benching.compare import SPREADS, described, lines
from mmrouter_cli.benching.values import Result

POINTS = ("mean", "p50", "p90", "p95", "p99", "max")
SLOW_CLIENT = 0.1
"""Share of the first token's median that the client's own timers may be late before it is said."""


def show(console: Console, result: Result) -> None:
    """Print one run."""
    table = Table(title=Text(title(result)))
    table.add_column("milliseconds")
    for point in POINTS:
        table.add_column(point, justify="right")
    table.add_column("values", justify="right")
    for field, name in SPREADS.items():
        spread = getattr(result, field)
        if spread is not None:
            values = [f"{1000 * getattr(spread, point):,.1f}" for point in POINTS]
            table.add_row(name, *values, f"{spread.count:,}")
    console.print(table)
    for said in facts(result):
        console.print(Text(said))
    for kind, failure in result.failures.items():
        console.print(Text(f"{failure.count} failed: {kind}: {failure.first}", style="red"))
    for said in doubts(result):
        console.print(Text(said, style="yellow"))


def title(result: Result) -> str:
    """Return what was run where."""
    policy = f" by {result.policy}" if result.policy else ""
    return f"{result.model} at {result.url}{policy}, {result.began}"


def facts(result: Result) -> list[str]:
    """Return what holds of a run as a whole."""
    seconds = result.seconds
    found = [described(result.load) + (f"; {result.left_out} longer ones left out" if result.left_out else "")]
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
            said += f"; {len(routing.workers)} engines, the busiest with "
            said += f"{max(routing.workers.values()) / sum(routing.workers.values()):.0%} of the requests"
        found.append(said)
    return found


def doubts(result: Result) -> list[str]:
    """Return what makes a run worth less than it looks."""
    found = []
    if result.interrupted:
        found.append(f"interrupted: {result.unanswered} requests were under way, and not all were sent")
    if result.late_share:
        found.append(f"{result.late_share:.1%} of the requests went out more than 100 ms after they were due")
    if result.first_token is not None and result.lag > SLOW_CLIENT * result.first_token.p50:
        found.append(f"this client's own timers were {1000 * result.lag:.1f} ms late (p99): its machine is busy")
    return found


def show_comparison(console: Console, first: Result, second: Result) -> None:
    """Print two runs side by side."""
    table = Table(title="second against first")
    table.add_column("figure")
    for heading in ("first", "second", "ratio"):
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


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}x"
