"""Child processes in groups of their own that die with this process, and the sink for their output."""

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mmrouter_cli.local.cleanup_guard import members, objects, remove_unused, shared_memory

LINE_LIMIT = 64 * 1024
OUTPUT_SECONDS = 0.3
MARK = "MMROUTER_LOCAL_RUN"
_PR_SET_PDEATHSIG = 1


class Guard:
    """The run's end of the cleanup guard process."""

    def __init__(self, mark: str) -> None:
        script = Path(__file__).with_name("cleanup_guard.py")
        self.mark = mark
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-I", "-S", str(script), f"{MARK}={mark}"],
            stdin=subprocess.PIPE,
            # Inherited output would keep readers of our output waiting.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def send(self, line: str) -> None:
        """Register a folder to remove (its path) or a process group to kill (``+GROUP``, ``-GROUP`` at its end)."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guard was killed: children still get the parent-death signal
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    async def close(self) -> None:
        """Clean up now and wait for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        await asyncio.to_thread(self._process.wait)


@dataclass(slots=True)
class Child:
    """A running process and the end of its output."""

    process: asyncio.subprocess.Process
    output: "asyncio.Task[None]"
    guard: Guard
    objects_before: frozenset[tuple[str, int]]
    memory: set[str] = field(default_factory=set)
    recorded_at: float = -math.inf

    @property
    def pid(self) -> int:
        return self.process.pid

    def terminate(self) -> None:
        """Terminate the first process but not its children, as a kubelet does."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def record_memory(self, *, every: float = 0.0) -> None:
        """Record the group's shared memory, at most every ``every`` seconds, to remove it after a crash."""
        if time.monotonic() - self.recorded_at >= every:
            self.recorded_at = time.monotonic()
            self.memory |= shared_memory(members(self.pid), self.objects_before)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for the process and kill its children, as in a container; return the exit status."""
        try:
            code = await self.process.wait()
        finally:
            self.kill()
            self.guard.send(f"-{self.pid}")
        # A process that left the group may hold the output open for long.
        await asyncio.wait([self.output], timeout=OUTPUT_SECONDS)
        self.output.cancel()
        remove_unused(self.memory)
        return code


async def spawn(
    argv: Sequence[str], *, env: Mapping[str, str], folder: Path, guard: Guard, line: Callable[[str], None]
) -> Child:
    """Start a process; ``line`` gets each line of its output. Raises ``OSError``."""
    reader_end, writer_end = os.pipe()
    before = objects()
    try:
        # Not asyncio's pipe, whose wait() would also wait for grandchildren that hold it.
        process = await asyncio.create_subprocess_exec(
            *argv,
            env={**env, MARK: guard.mark},
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writer_end,
            stderr=writer_end,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
    except BaseException:
        os.close(reader_end)
        raise
    finally:
        os.close(writer_end)
    guard.send(f"+{process.pid}")
    return Child(process, asyncio.create_task(_pump(reader_end, line)), guard, before)


def _die_with_parent() -> Callable[[], None]:
    # Resolved here, because between fork and exec only the call itself is safe.
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


async def _pump(descriptor: int, line: Callable[[str], None]) -> None:
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    rest = b""
    try:
        while chunk := await reader.read(LINE_LIMIT):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LINE_LIMIT:
                lines.append(rest)
                rest = b""
            for raw in lines:
                line(raw.decode(errors="replace").rstrip("\r"))
        if rest:
            line(rest.decode(errors="replace"))
    finally:
        transport.close()


LogSink = Callable[[str, str], None]
"""Called with a source (``pod/container``, or ``pod`` for messages about it) and one line of text."""

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")


@contextlib.contextmanager
def file_sink(path: Path) -> Iterator[LogSink]:
    """Return a sink that adds lines to a file, with the time. Raises ``OSError`` where it cannot be opened."""
    with path.open("a", encoding="utf-8", errors="replace", buffering=1) as file:

        def sink(source: str, line: str) -> None:
            with contextlib.suppress(OSError):  # as on the console
                file.write(f"{time.strftime('%H:%M:%S')} {source} | {Text.from_ansi(line).plain}\n")

        yield sink


def console_sink() -> LogSink:
    """Return a sink that prints to standard error, coloured where it is a terminal."""
    target = Console(stderr=True)
    width = 0

    def sink(source: str, line: str) -> None:
        nonlocal width
        width = max(width, len(source))
        colour = COLOURS[zlib.crc32(source.encode()) % len(COLOURS)]
        # Styled text, because output must not be interpreted as markup.
        prefix = Text(f"{source:<{width}} | ", style=colour)
        with contextlib.suppress(OSError):  # a full disk must not end the process that a line is about
            target.print(prefix + Text.from_ansi(line, style=""), soft_wrap=True, highlight=False)

    return sink
