"""Single flight: concurrent calls with one key share one execution, cancelled with its last caller, never cached."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(eq=False)
class _Execution(Generic[V]):
    task: asyncio.Task[V]
    callers: int = 0


class SingleFlight(Generic[K, V]):
    """The executions in progress, by key."""

    def __init__(self) -> None:
        self._executions: dict[K, _Execution[V]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._executions

    async def run(self, key: K, execute: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Return the result of this key's execution; start ``execute`` where there is none. Raises what it raises."""
        execution = self._executions.get(key)
        if execution is None:
            execution = self._executions[key] = _Execution(asyncio.create_task(execute()))
            execution.task.add_done_callback(partial(self._finish, key, execution))
        execution.callers += 1
        try:
            return await asyncio.shield(execution.task)
        finally:
            execution.callers -= 1
            if execution.callers == 0 and not execution.task.done():
                # Forget it at once: a new caller must not join an execution that is being cancelled.
                self._forget(key, execution)
                execution.task.cancel()

    async def close(self) -> None:
        tasks = [execution.task for execution in self._executions.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finish(self, key: K, execution: _Execution[V], task: asyncio.Task[V]) -> None:
        self._forget(key, execution)
        if not task.cancelled():
            task.exception()  # mark it as retrieved, since all callers may have been cancelled

    def _forget(self, key: K, execution: _Execution[V]) -> None:
        if self._executions.get(key) is execution:
            del self._executions[key]
