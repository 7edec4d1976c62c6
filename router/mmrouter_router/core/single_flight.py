"""Single flight: work that several ask for at the same time is done once.

A flight belongs to nobody: it goes on while anyone waits for it and ends when the last one has gone, so there are never
more flights than waiters. What it brings, a failure too, is shared by all who waited, and not kept.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(eq=False)
class _Flight(Generic[V]):
    task: asyncio.Task[V]
    waiters: int = 0


class Flights(Generic[K, V]):
    """What is under way, by key."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    async def join(self, key: K, fly: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Return what the flight of this key brings; ``fly`` starts it where none is under way. Raises what it raises.

        A waiter that is cancelled leaves the others theirs.
        """
        flight = self._flights.get(key) or self._start(key, fly)
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                # Forgotten at once: who comes now must not join a flight that is ending.
                self._forget(key, flight)
                flight.task.cancel()

    async def close(self) -> None:
        """End all flights."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, key: K, fly: Callable[[], Coroutine[Any, Any, V]]) -> _Flight[V]:
        flight = self._flights[key] = _Flight(asyncio.create_task(fly()))

        def landed(task: asyncio.Task[V]) -> None:
            self._forget(key, flight)
            if not task.cancelled():
                task.exception()  # whoever still waits gets it; nobody may be left

        flight.task.add_done_callback(landed)
        return flight

    def _forget(self, key: K, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
