"""How a process's servers end: what is on its way arrives, what is under way finishes, nothing new begins."""

import asyncio
import itertools
import os
import signal

import httpx
import pytest

from mmrouter_router.http.server import Server, Shutdown, serve

PORT, OTHER_PORT = 8000, 9090
_hosts = itertools.count(1)


class Process:
    """The servers of one process in this one. ``/held`` answers its first half and then waits for ``go``."""

    def __init__(self, drain_seconds: float = 20.0) -> None:
        self.ip = f"127.83.{os.getpid() % 250}.{next(_hosts)}"
        self.url, self.other = f"http://{self.ip}:{PORT}", f"http://{self.ip}:{OTHER_PORT}"
        self.shutdown, self.go, self.held = Shutdown(), asyncio.Event(), asyncio.Event()
        self._clients = Server(self._app, self.ip, PORT, drain_seconds=drain_seconds)
        self._others = Server(self._app, self.ip, OTHER_PORT, drain_seconds=1)
        self.task: asyncio.Task | None = None

    async def _app(self, scope, receive, send) -> None:
        if self.shutdown.draining and scope["server"][1] == PORT:
            send = self.shutdown.closing(send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/held":
            await send({"type": "http.response.body", "body": b"one ", "more_body": True})
            self.held.set()
            await self.go.wait()
        await send({"type": "http.response.body", "body": b"two"})

    async def __aenter__(self) -> "Process":
        self.task = asyncio.create_task(serve(self._clients, [self._others], self.shutdown))
        while not (self._clients.started and self._others.started):
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go.set()
        self.shutdown.stop("the test is over")
        await asyncio.wait_for(self.task, 20)

    async def refuses(self) -> None:
        """Wait until a new connection is refused."""
        async with asyncio.timeout(10):
            while True:
                try:
                    _, writer = await asyncio.open_connection(self.ip, PORT)
                except (ConnectionRefusedError, ConnectionResetError):
                    return  # reset: it was in the queue of a socket that closed
                writer.close()
                await asyncio.sleep(0.005)


async def test_draining_server_accepts_connections_and_closes_each_after_its_answer():
    async with Process() as process, httpx.AsyncClient(base_url=process.url) as client:
        assert "connection" not in (await client.get("/")).headers
        process.shutdown.drain("its pod is being deleted")
        for _ in range(2):
            answer = await client.get("/")
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert not process.shutdown.stopping.is_set()


async def test_idle_connection_is_served_after_the_listener_closed():
    async with Process() as process, httpx.AsyncClient(base_url=process.url) as client:
        await client.get("/")
        process.shutdown.stop("SIGTERM")
        await process.refuses()
        answer = await client.get("/")
        assert (answer.text, answer.headers["connection"]) == ("two", "close")


async def test_pending_answer_is_finished_while_other_ports_are_served():
    async with Process() as process, httpx.AsyncClient(timeout=20) as client:
        answer = asyncio.create_task(client.get(f"{process.url}/held"))
        await process.held.wait()
        process.shutdown.stop("SIGTERM")
        await process.refuses()
        await asyncio.sleep(1.5)  # longer than idle connections are kept
        assert (await client.get(process.other)).status_code == 200
        assert not process.task.done()
        process.go.set()
        assert (await answer).text == "one two"
        await asyncio.wait_for(process.task, 10)
        with pytest.raises(httpx.ConnectError):
            await client.get(process.other)


async def test_answer_beyond_the_drain_time_is_truncated():
    async with Process(drain_seconds=1) as process, httpx.AsyncClient(timeout=20) as client:
        answer = asyncio.create_task(client.get(f"{process.url}/held"))
        await process.held.wait()
        process.shutdown.stop("SIGTERM")
        with pytest.raises(httpx.RemoteProtocolError):
            await answer
        await asyncio.wait_for(process.task, 10)


async def test_server_without_connections_exits_immediately():
    async with Process(drain_seconds=600) as process:
        process.shutdown.stop("SIGTERM")
        await asyncio.wait_for(process.task, 20)  # not the drain time, of which this is a small part


async def test_first_signal_drains_and_second_exits():
    async with Process(drain_seconds=600) as process, httpx.AsyncClient(timeout=20) as client:
        answer = asyncio.create_task(client.get(f"{process.url}/held"))
        await process.held.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await process.refuses()
        assert not process.task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(process.task, 10)
        process.go.set()
        await asyncio.gather(answer, return_exceptions=True)
