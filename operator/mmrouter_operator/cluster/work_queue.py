"""The work queue: :class:`KeyQueue` schedules keys without a clock of its own, :class:`Workers` runs them.

A key runs at most once at a time. Adds before it runs coalesce into one run; adds while it runs cause one more run. Of
several delays the earliest applies.
"""

import asyncio
import logging
import math
import random
from collections import Counter
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


class KeyQueue:
    """Which keys may run, and when. Methods take the current time; none of them waits."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self.due: dict[Key, float] = {}
        """The waiting keys, delayed ones included, and when each may run."""
        self.running: set[Key] = set()
        self.failures: Counter[Key] = Counter()
        """Failures in a row."""

    def ready(self, now: float) -> int:
        """Number of keys that could run now with a free worker."""
        return sum(1 for key, due in self.due.items() if due <= now and key not in self.running)

    def add(self, key: Key, now: float, delay: float = 0.0) -> None:
        """Schedule a key in ``delay`` seconds; an earlier schedule stays."""
        self.due[key] = min(self.due.get(key, math.inf), now + delay)

    def pop(self, now: float) -> tuple[Key, float] | None:
        """Take the key that is overdue longest, with the seconds it is overdue; it counts as running."""
        key = self._next()
        if key is None or self.due[key] > now:
            return None
        self.running.add(key)
        return key, now - self.due.pop(key)

    def succeeded(self, key: Key, now: float, again_in: float | None = None) -> None:
        """End a successful run; the key is due in ``again_in`` seconds, at the resync at the latest."""
        self.forget(key)
        resync = RESYNC * self._rng.uniform(1 - RESYNC_SPREAD, 1 + RESYNC_SPREAD)
        self.add(key, now, resync if again_in is None else min(again_in, resync))

    def failed(self, key: Key, now: float, at_least: float = 0.0, *, reset: bool = False) -> float:
        """End a failed run. Returns the seconds until the next; adds made meanwhile are delayed as long.

        A failing run may change objects before it fails, and must not trigger itself by that. ``reset``: the next run
        starts from another state, so the backoff starts over.
        """
        self.running.discard(key)
        self.failures[key] = 1 if reset else self.failures[key] + 1
        delay = max(at_least, backoff(self.failures[key], self._rng))
        self.due[key] = now + delay
        return delay

    def forget(self, key: Key) -> None:
        """End a run whose object was deleted: forget the key, unless it was added meanwhile."""
        self.running.discard(key)
        self.failures.pop(key, None)

    def clear(self) -> None:
        """Forget all waiting keys. Running ones must be ended by their worker."""
        self.due.clear()
        self.failures.clear()

    def wake_at(self, now: float) -> float | None:
        """When the next key may run (``now`` if one may already); ``None`` without a waiting key that could."""
        key = self._next()
        return None if key is None else max(now, self.due[key])

    def _next(self) -> Key | None:
        """Return the key that is due first, of those that do not run."""
        # Looked for each time: deployments are counted in hundreds, and a reconcile takes far longer.
        return min((key for key in self.due if key not in self.running), key=self.due.__getitem__, default=None)


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
    ) -> None:
        self._work = work
        self._metrics = metrics
        self._concurrency = concurrency
        self._deadline = deadline
        self._version = version
        self.queue = KeyQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._draining = False

    def add(self, key: Key) -> None:
        """See :meth:`KeyQueue.add`."""
        self.queue.add(key, _now())
        self._changed.set()

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
                    and (entry := self.queue.pop(_now())) is not None
                ):
                    task = asyncio.create_task(self._run_key(*entry))
                    self._tasks.add(task)
                    task.add_done_callback(self._done)
                self._metrics.depth.set(self.queue.ready(_now()))
                busy = self._draining or len(self._tasks) >= self._concurrency
                wake = None if busy else self.queue.wake_at(_now())
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
            self.queue.clear()
            self._metrics.depth.set(0)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _run_key(self, key: Key, waited: float) -> None:
        self._metrics.wait.observe(waited)
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
            self.queue.forget(key)
            raise
        except Exception:
            # A bug that affects one deployment must not stop the others.
            log.exception("reconcile failed", extra={"namespace": key[0], "object": key[1]})
        if result == "success":
            self.queue.succeeded(key, _now(), again_in)
        elif result == "gone":
            self.queue.forget(key)
        else:
            edited = self._version(key) != version
            self.queue.failed(key, _now(), pause, reset=reset or edited)
        self._metrics.reconciles.labels(result).inc()
        self._metrics.duration.observe(_now() - started)


def _now() -> float:
    return asyncio.get_running_loop().time()
