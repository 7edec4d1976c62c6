"""When requests go out: so many conversations at a time, or by the clock."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from mmrouter_cli.bench.request import clock
from mmrouter_cli.bench.types import Conversation, Load

MOST_UNDER_WAY = 1024
"""Conversations by the clock that are under way at once; the next one waits, and is counted as late."""
AHEAD_SECONDS = 1.0
"""A conversation by the clock begins so much before its first turn is due: that is drawn by then."""

Talk = Callable[[Conversation, float | None], Awaitable[None]]
"""Has one conversation; the time at which its first turn is due, ``None``: at once."""


async def drive(plan: Sequence[Conversation], load: Load, began: float, talk: Talk) -> None:
    """Have every conversation of a plan; returns when all have ended."""
    if load.concurrency is None:
        await _by_the_clock(plan, began, talk)
    else:
        await _at_a_time(iter(plan), load.concurrency, talk)


async def _at_a_time(plan: Iterator[Conversation], count: int, talk: Talk) -> None:
    async def one_after_the_other() -> None:
        for conversation in plan:
            await talk(conversation, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one_after_the_other())


async def _by_the_clock(plan: Sequence[Conversation], began: float, talk: Talk) -> None:
    room = asyncio.Semaphore(MOST_UNDER_WAY)

    async def one(conversation: Conversation, due: float) -> None:
        try:
            await talk(conversation, due)
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        for conversation in plan:
            due = began + conversation.at
            await asyncio.sleep(max(0.0, due - AHEAD_SECONDS - clock()))
            await room.acquire()
            group.create_task(one(conversation, due))
