"""A measured process that is told what to do by JSON lines: one command per line, one answer per line."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self


class ChildError(Exception):
    """The process answered with an error or ended; the message has its words."""


class Child:
    """The process; it is killed at the end of the context. ``folder`` is its own and goes with it."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have a command carried out and return its answer. Raises :class:`ChildError`."""
        self.begin(do, **arguments)
        return self.result()

    def begin(self, do: str, **arguments: Any) -> None:
        """Have a command carried out; :meth:`result` waits for its answer. Raises :class:`ChildError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def result(self) -> dict[str, Any]:
        """Return the answer to the command that was begun. Raises :class:`ChildError`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self.name}: {answer['error']}")
        return answer

    def _ended(self) -> ChildError:
        words = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        return ChildError(f"{self.name} ended with status {self._process.wait()}: {' '.join(words)}")
