"""Wait for a condition, with a bound that only ends a hang. Act in threads beside what waits."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

PATIENCE = 5
"""How many times longer than expected a test waits: a busy machine is slow, and that is no failure."""
SHARE, LONGEST = 0.05, 0.3
"""Without a given interval, polls are this share of the time so far apart, or this many seconds: what a test waits for
needs the CPU more than the test does.
"""


def wait_for(
    condition: Callable[[], Any],
    seconds: float,
    what: str,
    *,
    every: float | None = None,
    known: Callable[[], object] | None = None,
) -> Any:
    """Poll until ``condition`` returns something true and return it. Raises ``TimeoutError`` that names ``what``.

    ``seconds``: more than it takes on an idle machine; the bound is :data:`PATIENCE` times that. ``every``: seconds
    between polls, for conditions that pass. ``known``: returns what the error tells in addition.
    """
    began = time.monotonic()
    deadline = began + PATIENCE * seconds
    while True:
        if value := condition():
            return value
        if time.monotonic() >= deadline:
            more = f"\n{known()}" if known is not None else ""
            raise TimeoutError(f"not within {PATIENCE * seconds:g} s: {what}{more}")
        time.sleep(every or min(LONGEST, max(0.02, SHARE * (time.monotonic() - began))))


def answers_ok(url: str, seconds: float = 10) -> bool:
    """Whether a URL answers 200 within so many seconds."""
    try:
        return httpx.get(url, timeout=seconds, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait in an event loop until a condition holds. Raises ``TimeoutError``; the bound only ends a hang."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@contextmanager
def repeating(act: Callable[[], Any], pause: float) -> Iterator[None]:
    """Call ``act`` again and again in a thread until the block ends, each time after a pause in seconds."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(pause):
            act()

    thread = threading.Thread(target=run, name=f"repeating {act}")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def in_threads(work: Callable[[int], Any], count: int, stop: threading.Event, seconds: float) -> Iterator[None]:
    """Call ``work`` with each number in a thread of its own until the block ends, which sets ``stop``. ``seconds``
    bound the wait for each thread's end. Raises what a thread raised.
    """
    raised: list[Exception] = []

    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:  # it is raised again where the block ends
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(seconds)
    if raised:
        raise raised[0]
