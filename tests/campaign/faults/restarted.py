"""A process that is started again soon after its end, as a kubelet does."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, Protocol, TypeVar

from waiting import repeating

LOOK_SECONDS = 0.2


class _Run(Protocol):
    process: "subprocess.Popen[Any]"


T = TypeVar("T", bound=_Run)


class Restarted(Generic[T]):
    """``now``: the newest run; ``ends``: how many have ended."""

    def __init__(self, start: Callable[[], AbstractContextManager[T]]) -> None:
        self._start, self._stack = start, ExitStack()
        self.now = self._stack.enter_context(start())
        self.ends = 0

    def _look(self) -> None:
        if self.now.process.poll() is not None:
            self.ends += 1
            self.now = self._stack.enter_context(self._start())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep it running until the block ends, and end it."""
        with self._stack, repeating(self._look, LOOK_SECONDS):
            yield
