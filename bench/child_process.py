"""Measured processes: servers, and children that take commands as JSON lines and answer each with one line."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil


class ChildError(Exception):
    """The process answered with an error or ended; the message has the end of its log."""


class Process:
    """A process with a log; terminated, then killed, at the end of the context. ``folder`` is removed with it."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, **pipes: Any
    ) -> None:
        """``pipes``: arguments of ``Popen`` for streams that do not go to the log."""
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="mmrouter-bench-")
        self.folder = Path(self._folder.name)
        with (self.folder / "log").open("wb") as log:
            streams = {"stdout": log, "stderr": log, **pipes}
            self.process = psutil.Popen(command, env={**os.environ, **(environment or {})}, **streams)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        family = self._family() if self.process.is_running() else []
        for process in family:
            process.terminate()
        for process in psutil.wait_procs(family, timeout=5)[1]:
            process.kill()
        self.process.communicate()
        self._folder.cleanup()

    def _family(self) -> list[psutil.Process]:
        return [*self.process.children(recursive=True), self.process]

    def cpu(self) -> float:
        """Return CPU seconds used so far, children included, in ticks of 10 ms."""
        times = [process.cpu_times() for process in self._family()]
        return float(sum(each.user + each.system for each in times))

    def thread_cpu(self) -> float:
        """Return CPU seconds of all current threads; in nanoseconds where the kernel counts so, for short runs."""
        counted = list(Path(f"/proc/{self.process.pid}/task").glob("*/schedstat"))
        return sum(int(path.read_text().split()[0]) for path in counted) / 1e9 if counted else self.cpu()

    def resident(self) -> int:
        """Return the resident memory in bytes, children included."""
        return sum(process.memory_info().rss for process in self._family())

    def end_of_log(self) -> str:
        return " ".join((self.folder / "log").read_text(errors="replace").split())[-300:]


class Child(Process):
    """A process that takes commands."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        super().__init__(name, command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @classmethod
    def module(cls, module: str, *arguments: str) -> Self:
        return cls(module.rpartition(".")[2], [sys.executable, "-m", module, *arguments])

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Run a command and return its answer. Raises :class:`ChildError`."""
        self.begin(do, **arguments)
        return self.result()

    def begin(self, do: str, **arguments: Any) -> None:
        """Start a command whose answer :meth:`result` returns. Raises :class:`ChildError`."""
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def result(self) -> dict[str, Any]:
        """Return the answer to the command in progress. Raises :class:`ChildError`."""
        line = self.process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self.name}: {answer['error']}")
        return answer

    def _ended(self) -> ChildError:
        return ChildError(f"{self.name} ended with status {self.process.wait()}: {self.end_of_log()}")


async def serve(commands: object) -> None:
    """Carry out commands from stdin by the methods of an object, until stdin ends."""
    reader = asyncio.StreamReader(limit=2**26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = json.loads(line)
        try:
            answer = await getattr(commands, command.pop("do"))(**command)
        except Exception as error:  # the parent raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
