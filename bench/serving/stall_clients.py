"""The processes of benchmark *stall*: clients whose tokens and answers are timed, and the neighbour beside them.

Each runs in a process of its own, so that writing the neighbour's bodies does not delay the clock of the others.
"""

import asyncio
import base64
import random
import time
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

import uvloop

from bench.child_process import serve
from bench.placing.workload import padded_png
from bench.serving.load_generator import PROMPT, Answer, body_of, chat_body, message
from mmrouter_cli.bench.http_client import connect

NEIGHBOUR = "neighbour"
"""API key of the neighbour, which is another tenant."""
PROMPT_CHARACTERS = 54_000
"""About 32,000 tokens of the benchmark's tokenizer."""
IMAGE_BYTES = 10_000_000
PARTS = 300_000
CONNECTIONS_PER_SECOND = 64
PAUSE_SECONDS = 0.1
"""Between an answer and the next request, of the neighbour and of the short chats."""
OPENING_SECONDS = 0.5
"""Before the first short chat, so that it does not wait for the streams that are opened all at once."""
WORDS = PROMPT.split()


class _Gaps(Answer):
    """The times between the tokens of a stream, in microseconds."""

    def __init__(self, gaps: list[float]) -> None:
        super().__init__()
        self._gaps, self._last = gaps, 0

    def on_data(self, data: bytes) -> None:
        now = time.perf_counter_ns()
        if self._last:
            self._gaps.append((now - self._last) / 1000)
        self._last = now
        super().on_data(data)


class StallClients:
    """Commands of a process, as of :class:`~bench.serving.load_generator.LoadGenerator`."""

    async def gaps(self, host: str, port: int, streams: int, pause_ms: int, seconds: float) -> dict[str, Any]:
        """Keep streams open for some time, at least one on each connection. Answer the microseconds between their
        tokens, of short chats, and of ``GET /health``.
        """
        end, gaps = time.monotonic() + seconds, list[float]()
        paced = message(host, port, chat_body(stream=True, pause_ms=pause_ms))
        health = f"GET /health HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode()

        async def stream() -> None:
            connection = await connect(host, port)
            while True:
                answer = _Gaps(gaps)
                await connection.exchange(paced, answer)
                answer.check(b"[DONE]")
                if time.monotonic() >= end:
                    connection.close()
                    return

        async def timed(request: bytes, expected: bytes) -> list[float]:
            connection, times = await connect(host, port), list[float]()
            await asyncio.sleep(min(OPENING_SECONDS, seconds / 2))
            while True:
                answer, began = Answer(), time.perf_counter_ns()
                await connection.exchange(request, answer)
                times.append((time.perf_counter_ns() - began) / 1000)
                answer.check(expected)
                if time.monotonic() >= end:
                    connection.close()
                    return times
                await asyncio.sleep(PAUSE_SECONDS)

        short = message(host, port, chat_body(stream=False))
        answers = await asyncio.gather(
            timed(short, b"lazy dog"), timed(health, b""), *(stream() for _ in range(streams))
        )
        return {"gap": gaps, "chat": answers[0], "health": answers[1]}

    async def disturb(self, host: str, port: int, kind: str, seconds: float) -> dict[str, Any]:
        """Be the neighbour for some time; answer the microseconds of its requests."""
        end, times = time.monotonic() + seconds, list[float]()
        if kind == "connections":
            await _repeat_connections(lambda: _one(host, port, chat_body(stream=False), times), end)
        elif kind != "none":
            body_for = _bodies(kind)
            while not times or time.monotonic() < end:
                await _one(host, port, body_for(), times)
                await asyncio.sleep(PAUSE_SECONDS)
        return {"us": times}


def _bodies(kind: str) -> Callable[[], bytes]:
    """Return what makes the next body of a kind; what does not change is made once."""
    if kind == "prompts":
        rnd, numbers = random.Random(time.monotonic_ns()), count()
        return lambda: body_of(
            f"{next(numbers)} {' '.join(rnd.choices(WORDS, k=PROMPT_CHARACTERS // 4))}"[:PROMPT_CHARACTERS]
        )
    if kind == "pictures":
        url = "data:image/png;base64," + base64.b64encode(padded_png(IMAGE_BYTES)).decode()
        body = body_of([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": PROMPT}])
    elif kind == "parts":
        body = body_of([{"type": "text", "text": str(number)} for number in range(PARTS)])
    else:
        raise ValueError(f"no neighbour sends {kind}")
    return lambda: body


async def _one(host: str, port: int, body: bytes, times: list[float]) -> None:
    """Send a request over a new connection; 400 is an answer, too: some routers refuse 300,000 parts."""
    connection, answer, began = await connect(host, port), Answer(), time.perf_counter_ns()
    await connection.exchange(message(host, port, body, NEIGHBOUR), answer)
    times.append((time.perf_counter_ns() - began) / 1000)
    connection.close()
    if answer.status not in (200, 400):
        answer.check(b"")


async def _repeat_connections(open_one: Callable[[], Coroutine[None, None, None]], end: float) -> None:
    async with asyncio.TaskGroup() as tasks:
        while True:
            tasks.create_task(open_one())
            if time.monotonic() >= end:
                return
            await asyncio.sleep(1 / CONNECTIONS_PER_SECOND)


if __name__ == "__main__":
    uvloop.run(serve(StallClients()))
