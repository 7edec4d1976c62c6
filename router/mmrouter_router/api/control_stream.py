"""The control stream: server-sent events, one whole report each, and only where something has changed.

Standings are looked at on every change and twice a second, because some come of time alone (a silent sidecar, a probe).
Counts that have moved are told at most every :data:`COUNTS_SECONDS`: an idle router sends nothing but comments, a busy
one a bounded trickle.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson

from mmrouter_router.fleet.workers import Fleet

GATHER_SECONDS = 0.2
"""Changes that come together are one event."""
LOOK_SECONDS = 0.5
COUNTS_SECONDS = 5.0
KEEPALIVE_SECONDS = 15.0
"""A comment so often lets the other side tell a quiet router from a dead one."""

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
    """Yield the report now and after changes, comments in between; ends after a last event once ``stopping`` is set."""
    changed = asyncio.Event()
    fleet.on_change(changed.set)
    told: dict[str, Any] = {}
    said_at = counted_at = -float("inf")
    try:
        while True:
            changed.clear()
            ending, now, current = stopping.is_set(), time.monotonic(), report()
            moved = [name for name, value in current.items() if told.get(name) != value]
            if any(name not in COUNTS for name in moved) or (moved and now - counted_at >= counts_seconds):
                told, said_at, counted_at = current, now, now
                yield b"data: " + orjson.dumps(current) + b"\n\n"
            elif now - said_at >= keepalive_seconds:
                said_at = now
                yield KEEPALIVE
            if ending:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await changed.wait()
                await asyncio.sleep(GATHER_SECONDS)
    finally:
        fleet.off_change(changed.set)
