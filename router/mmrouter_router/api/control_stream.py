"""The control stream for the operator: server-sent events, each a whole report, sent only after changes.

Reports are compared after every change of the fleet and twice a second, because some states change with time alone (a
silent sidecar, a probe). Changes of counts alone are sent at most every :data:`COUNTS_SECONDS`, so an idle router sends
only comments and a busy one a bounded number of events.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson

from mmrouter_router.fleet.workers import Fleet

BATCH_SECONDS = 0.2
"""Changes within this time are one event."""
CHECK_SECONDS = 0.5
COUNTS_SECONDS = 5.0
KEEPALIVE_SECONDS = 15.0
"""Interval of comments, by which the operator tells a quiet router from a dead one."""

COUNTS = ("decisions", "exact_decisions", "prompt_blocks", "hit_blocks")
KEEPALIVE = b": still here\n\n"


async def events(
    report: Callable[[], dict[str, Any]],
    fleet: Fleet,
    stopping: asyncio.Event,
    *,
    counts_seconds: float = COUNTS_SECONDS,
    keepalive_seconds: float = KEEPALIVE_SECONDS,
) -> AsyncIterator[bytes]:
    """Yield the report now and after changes, with comments in between; end after ``stopping`` is set."""
    changed = asyncio.Event()
    fleet.on_change(changed.set)
    last: dict[str, Any] = {}
    sent_at = counted_at = -float("inf")
    try:
        while True:
            changed.clear()
            ending, now, current = stopping.is_set(), time.monotonic(), report()
            differing = [name for name, value in current.items() if last.get(name) != value]
            if any(name not in COUNTS for name in differing) or (differing and now - counted_at >= counts_seconds):
                last, sent_at, counted_at = current, now, now
                yield b"data: " + orjson.dumps(current) + b"\n\n"
            elif now - sent_at >= keepalive_seconds:
                sent_at = now
                yield KEEPALIVE
            if ending:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await changed.wait()
                await asyncio.sleep(BATCH_SECONDS)
    finally:
        fleet.off_change(changed.set)
