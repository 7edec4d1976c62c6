"""A measured process that takes commands as JSON lines, one answer per line: its parent's end and its own loop."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self


class ChildError(Exception):
    """The process answered with an error or ended; the message has its last line of output."""


class Child:
    """The process, killed at the end of the context; ``folder`` is its own and is removed with it."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="mmrouter-bench-")
        self.folder = Path(self._folder.name)
        self._log = self.folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(environment or {})},
            )

    @classmethod
    def module(cls, module: str, *arguments: str) -> Self:
        return cls(module.rpartition(".")[2], [sys.executable, "-m", module, *arguments])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Run a command and return its answer. Raises :class:`ChildError`."""
        self.begin(do, **arguments)
        return self.result()

    def begin(self, do: str, **arguments: Any) -> None:
        """Start a command whose answer :meth:`result` returns. Raises :class:`ChildError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def result(self) -> dict[str, Any]:
        """Return the answer to the command in progress. Raises :class:`ChildError`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self.name}: {answer['error']}")
        return answer

    def _ended(self) -> ChildError:
        last_line = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        return ChildError(f"{self.name} ended with status {self._process.wait()}: {' '.join(last_line)}")


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
