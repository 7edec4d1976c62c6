"""``watch_listener`` reports the end of an engine without events, and not a closed connection."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from mmrouter_sidecar.engine import engine_probe

PORT = 8000
_hosts = itertools.count(1)


class Engine:
    """A server at an address of its own, which may end and start again."""

    def __init__(self) -> None:
        self.ip = f"127.83.{os.getpid() % 250}.{next(_hosts)}"
        self.taken = 0
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, self.ip, PORT)

    def hang_up(self) -> None:
        """Close every connection."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def end(self) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()

    def _connected(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        self._writers.append(writer)


@asynccontextmanager
async def watched(engine: Engine) -> AsyncIterator[list[int]]:
    """Watch an engine; gives a list that grows with each end."""
    ends: list[int] = []
    watching = asyncio.create_task(engine_probe.watch_listener(engine.ip, PORT, lambda: ends.append(engine.taken)))
    try:
        yield ends
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.005)


async def test_each_end_is_reported_once_even_after_a_fast_restart(monkeypatch):
    monkeypatch.setattr(engine_probe, "RECONNECT_SECONDS", 0.02)
    engine = Engine()
    async with watched(engine) as ends:
        for count in (1, 2):
            await engine.start()
            await until(lambda wanted=count: engine.taken == wanted)
            engine.end()
            await until(lambda wanted=count: len(ends) == wanted)
    assert ends == [1, 2]


async def test_an_engine_that_never_listened_has_not_ended(monkeypatch):
    monkeypatch.setattr(engine_probe, "RECONNECT_SECONDS", 0.001)
    engine, asked = Engine(), []
    connect = asyncio.open_connection

    async def counted(ip: str, port: int):
        asked.append(ip)
        return await connect(ip, port)

    monkeypatch.setattr(asyncio, "open_connection", counted)
    async with watched(engine) as ends:
        await until(lambda: len(asked) > 3)
    assert ends == []


async def test_a_closed_connection_is_no_end_while_the_engine_listens(monkeypatch):
    monkeypatch.setattr(engine_probe, "RECONNECT_SECONDS", 0.001)
    engine = Engine()
    await engine.start()
    async with watched(engine) as ends:
        for count in (1, 2, 3):
            await until(lambda wanted=count: engine.taken == wanted)
            assert ends == []
            engine.hang_up()
        await until(lambda: engine.taken == 4)
        engine.end()
        await until(lambda: ends)
    assert len(ends) == 1
