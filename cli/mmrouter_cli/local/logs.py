"""Where the lines of all processes go: one sink, which shows who said what."""

import zlib
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

LogSink = Callable[[str, str], None]
"""Called with a source (``pod/container``, or ``pod`` for what is said about it) and one line of text."""

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")


def console_sink(console: Console | None = None) -> LogSink:
    """Return a sink that prints to ``console`` (default: standard error), coloured where it is a terminal."""
    target = console or Console(stderr=True)
    width = 0

    def sink(source: str, line: str) -> None:
        nonlocal width
        width = max(width, len(source))
        colour = COLOURS[zlib.crc32(source.encode()) % len(COLOURS)]
        # Styled text instead of markup: what a process prints is shown, never interpreted.
        prefix = Text(f"{source:<{width}} | ", style=colour)
        target.print(prefix + Text.from_ansi(line, style=""), soft_wrap=True, highlight=False)

    return sink
