"""Items that an engine has taken and no chat has named yet: bounded, each with an end."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from mmrouter_handover.plugin.wire import HandOverFailed

V = TypeVar("V")


class Kept(Generic[V]):
    """Values by name, ``limit_bytes`` in all. Usable from several threads. ``now`` in seconds, monotonic."""

    def __init__(self, limit_bytes: int, now: Callable[[], float]) -> None:
        self._limit, self._now = limit_bytes, now
        self._values: dict[str, tuple[V, int, float]] = {}
        self._mutex = threading.Lock()
        self.bytes = 0

    def put(self, name: str, value: V, length: int, seconds: float) -> None:
        """Keep a value for ``seconds``; one of the same name is replaced. Raises :class:`HandOverFailed` ``full``.

        Nothing that waits for its chat makes way: that chat would have to be sent twice.
        """
        with self._mutex:
            self._expire()
            before = self._values.get(name)
            bytes_then = self.bytes + length - (before[1] if before else 0)
            if bytes_then > self._limit:
                raise HandOverFailed("full", f"{self.bytes} of {self._limit} bytes wait for their chats")
            self._values[name] = (value, length, self._now() + seconds)
            self.bytes = bytes_then

    def get(self, name: str) -> V | None:
        """Return a value whose time is not over, and keep it."""
        with self._mutex:
            found = self._values.get(name)
            return found[0] if found and found[2] > self._now() else None

    def extend(self, name: str, seconds: float) -> bool:
        """Keep a value for at least ``seconds`` from now; return whether it is there."""
        with self._mutex:
            self._expire()
            found = self._values.get(name)
            if found:
                self._values[name] = (found[0], found[1], max(found[2], self._now() + seconds))
            return found is not None

    def drop(self, name: str) -> None:
        with self._mutex:
            self._drop(name)

    def clear(self) -> None:
        with self._mutex:
            self._values.clear()
            self.bytes = 0

    def expire(self) -> None:
        """Let go of what nobody asked for in time."""
        with self._mutex:
            self._expire()

    def __len__(self) -> int:
        return len(self._values)

    def _expire(self) -> None:
        now = self._now()
        for name in [name for name, (_, _, until) in self._values.items() if until <= now]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        found = self._values.pop(name, None)
        if found:
            self.bytes -= found[1]
