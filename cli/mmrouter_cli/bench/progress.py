"""Progress while a run goes on: a line that is drawn anew on a terminal, a line now and then elsewhere."""

import asyncio
import statistics
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mmrouter_cli.bench.request import clock

if TYPE_CHECKING:
    from mmrouter_cli.bench.run import Run

DRAWN_SECONDS, TOLD_SECONDS = 0.5, 5.0
RECENT = 500
"""Answers that the figures of the moment are of."""


class Screen:
    """Where progress is shown."""

    def __init__(self, console: Console) -> None:
        self._console = console

    async def follow(self, run: "Run", url: str) -> None:
        """Show a run until cancelled, and at its end once more."""
        if not self._console.is_terminal:
            while True:
                await asyncio.sleep(TOLD_SECONDS)
                self._console.print(line(run, url), soft_wrap=True)
        with Live(console=self._console, auto_refresh=False) as screen:
            try:
                while True:
                    screen.update(line(run, url), refresh=True)
                    await asyncio.sleep(DRAWN_SECONDS)
            finally:
                screen.update(line(run, url), refresh=True)


def line(run: "Run", url: str) -> Text:
    """Return a run in a line."""
    recent = [answer for answer in run.answers[-RECENT:] if not answer.error]
    failed = sum(bool(answer.error) for answer in run.answers[-RECENT:])
    seconds = max(1e-9, clock() - run.began)
    said = (
        f"{len(run.answers)} of {run.planned} at {url}, {run.in_flight} under way, {len(run.answers) / seconds:.3g}/s"
    )
    if recent:
        said += f"; first token {statistics.median(answer.first for answer in recent) * 1000:.0f} ms"
        prompt = sum(answer.prompt or 0 for answer in recent if answer.cached is not None)
        if prompt:
            said += f", cached {sum(answer.cached or 0 for answer in recent) / prompt:.0%}"
    text = Text(said, style="dim")
    if failed:
        text.append(f"; {failed} of the last {min(RECENT, len(run.answers))} failed", style="red")
    return text
