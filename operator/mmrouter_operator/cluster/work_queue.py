"""The work queue: :class:`KeyQueue` schedules keys without a clock of its own, :class:`Workers` runs them.

A key runs at most once at a time. Adds before it runs coalesce into one run; adds while it runs cause one more run. Of
several delays the earliest applies.
"""

import asyncio
import heapq
import logging
import random
from collections.abc import Awaitable, Callable

from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.snapshot import Key

log = logging.getLogger(__name__)

FIRST_BACKOFF, LAST_BACKOFF = 0.2, 300.0
RESYNC, RESYNC_SPREAD = 300.0, 0.2


def backoff(failures: int, rng: random.Random) -> float:
    """Seconds to wait after so many failures in a row: doubled each time, bounded, with half of it random."""
    # The exponent is bounded before the power is taken: failures may run into the thousands.
    full = min(LAST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(failures - 1, 30))
    return max(FIRST_BACKOFF, full * rng.uniform(0.5, 1.0))


def resync(rng: random.Random) -> float:
    """Seconds until a key without changes is reconciled again."""
    return RESYNC * rng.uniform(1 - RESYNC_SPREAD, 1 + RESYNC_SPREAD)


class KeyQueue:
    """Which keys may run, and when. Methods take the current time; none of them waits."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = 0
        self._running: set[Key] = set()
        self._failures: dict[Key, int] = {}

    def __len__(self) -> int:
        """Number of waiting keys, delayed ones included."""
        return len(self._due)

    @property
    def running(self) -> frozenset[Key]:
        """The running keys."""
        return frozenset(self._running)

    def ready(self, now: float) -> int:
        """Number of keys that could run now with a free worker."""
        return sum(1 for key, due in self._due.items() if due <= now and key not in self._running)

    def add(self, key: Key, now: float, delay: float = 0.0) -> None:
        """Schedule a key in ``delay`` seconds; an earlier schedule stays."""
        due = now + delay
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._push(key, due)

    def pop(self, now: float) -> tuple[Key, float] | None:
        """Take the key that is overdue longest, with the seconds it is overdue; it counts as running."""
        key = self._first(now)
        if key is None:
            return None
        waited = now - self._due.pop(key)
        self._running.add(key)
        return key, waited

    def succeeded(self, key: Key, now: float, again_in: float | None = None) -> None:
        """End a successful run; the key is due in ``again_in`` seconds, at the resync at the latest."""
        self._end(key)
        self._failures.pop(key, None)
        self.add(key, now, min(again_in if again_in is not None else float("inf"), resync(self._rng)))

    def failed(self, key: Key, now: float, at_least: float = 0.0, *, reset: bool = False) -> float:
        """End a failed run. Returns the seconds until the next; adds made meanwhile are delayed as long.

        A failing run may change objects before it fails, and must not trigger itself by that. ``reset``: the next run
        starts from another state, so the backoff starts over.
        """
        self._end(key)
        self._failures[key] = 1 if reset else self._failures.get(key, 0) + 1
        delay = max(at_least, backoff(self._failures[key], self._rng))
        self._due.pop(key, None)
        self.add(key, now, delay)
        return delay

    def forget(self, key: Key) -> None:
        """End a run whose object was deleted: forget the key, unless it was added meanwhile."""
        self._end(key)
        self._failures.pop(key, None)

    def failures(self, key: Key) -> int:
        """Failures in a row."""
        return self._failures.get(key, 0)

    def clear(self) -> None:
        """Forget all waiting keys. Running ones must be ended by their worker."""
        self._due.clear()
        self._heap.clear()
        self._failures.clear()

    def wake_at(self, now: float) -> float | None:
        """When the next key may run (``now`` if one may already); ``None`` without a waiting key that could."""
        self._compact()
        waiting = [due for key, due in self._due.items() if key not in self._running] if self._running else None
        if waiting is not None:
            return max(now, min(waiting)) if waiting else None
        return max(now, self._heap[0][0]) if self._heap else None

    def _first(self, now: float) -> Key | None:
        blocked: list[tuple[float, int, Key]] = []
        found = None
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            due, _, key = entry
            if self._due.get(key) != due:
                continue
            if key in self._running:
                blocked.append(entry)
                continue
            found = key
            break
        for entry in blocked:
            heapq.heappush(self._heap, entry)
        return found

    def _compact(self) -> None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)

    def _push(self, key: Key, due: float) -> None:
        self._order += 1
        heapq.heappush(self._heap, (due, self._order, key))
        # Replaced entries stay in the heap until it is compacted here.
        if len(self._heap) > 64 + 4 * len(self._due):
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def _end(self, key: Key) -> None:
        self._running.discard(key)


class ObjectDeleted(Exception):  # noqa: N818 - an outcome, not an error
    """The object of the key was deleted."""


class Retry(Exception):  # noqa: N818 - an outcome, not an error
    """The run failed in an expected way that has been reported; ``after`` is the least pause in seconds.

    ``reset``: the run made progress, so the backoff starts over. If one call in ten fails, doubling pauses would keep a
    deployment of twenty objects from ever becoming complete.
    """

    def __init__(self, message: str, after: float = 0.0, *, reset: bool = False) -> None:
        super().__init__(message)
        self.after = after
        self.reset = reset


class Workers:
    """Runs keys, at most ``concurrency`` at a time, each within ``deadline`` seconds.

    ``work`` returns the seconds until its next call, or ``None``. ``version`` of a key changes when its object is
    edited by others, never by our own writes.
    """

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        metrics: Metrics,
        *,
        concurrency: int = 8,
        deadline: float = 60.0,
        version: Callable[[Key], object] = lambda _: None,
        rng: random.Random | None = None,
    ) -> None:
        self._work = work
        self._metrics = metrics
        self._concurrency = concurrency
        self._deadline = deadline
        self._version = version
        self._queue = KeyQueue(rng)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._draining = False

    def add(self, key: Key, delay: float = 0.0) -> None:
        """See :meth:`KeyQueue.add`."""
        self._queue.add(key, _now(), delay)
        self._changed.set()

    def failures(self, key: Key) -> int:
        """Failures in a row."""
        return self._queue.failures(key)

    async def drain(self, seconds: float) -> None:
        """Start no more runs, and wait at most ``seconds`` for the running ones."""
        self._draining = True
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=seconds)

    async def run(self) -> None:
        """Run keys until cancelled; then cancel and await all runs, and clear the queue."""
        try:
            while True:
                self._changed.clear()
                while (
                    not self._draining
                    and len(self._tasks) < self._concurrency
                    and (entry := self._queue.pop(_now())) is not None
                ):
                    task = asyncio.create_task(self._run_key(*entry))
                    self._tasks.add(task)
                    task.add_done_callback(self._done)
                self._metrics.depth(self._queue.ready(_now()))
                busy = self._draining or len(self._tasks) >= self._concurrency
                wake = None if busy else self._queue.wake_at(_now())
                try:
                    async with asyncio.timeout(None if wake is None else max(wake - _now(), 0.0)):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._queue.clear()
            self._metrics.depth(0)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _run_key(self, key: Key, waited: float) -> None:
        self._metrics.started(waited)
        started = _now()
        result, again_in, pause, reset = "error", None, 0.0, False
        version = self._version(key)
        try:
            async with asyncio.timeout(self._deadline):
                again_in = await self._work(key)
            result = "success"
        except ObjectDeleted:
            result = "gone"
        except Retry as retry:
            result, pause, reset = "retry", retry.after, retry.reset
            log.warning("retrying: %s", retry, extra={"namespace": key[0], "object": key[1]})
        except TimeoutError:
            result = "timeout"
            log.error("not done within %.0f s", self._deadline, extra={"namespace": key[0], "object": key[1]})
        except asyncio.CancelledError:
            self._queue.forget(key)
            raise
        except Exception:
            # A bug that affects one deployment must not stop the others.
            log.exception("reconcile failed", extra={"namespace": key[0], "object": key[1]})
        if result == "success":
            self._queue.succeeded(key, _now(), again_in)
        elif result == "gone":
            self._queue.forget(key)
        else:
            edited = self._version(key) != version
            self._queue.failed(key, _now(), pause, reset=reset or edited)
        self._metrics.finished(result, _now() - started)


def _now() -> float:
    return asyncio.get_running_loop().time()
