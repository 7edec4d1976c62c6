"""The listener accepts bursts of connections; the servers of a process shut down without losing a request."""

import asyncio
import functools
import gc
import os
import resource
import signal
import socket
import weakref
from contextlib import asynccontextmanager, closing, suppress
from typing import Final

import httpx
import pytest
import uvloop
from unit.router.rig import PORT, Engine, LoopbackServer, loopback, no_free_descriptors, unlimited
from uvicorn.config import STARTUP_FAILURE
from waiting import until

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.http import server as http_server
from mmrouter_router.http.server import BATCH, Listener, Server, Shutdown, client_limit, raise_open_files, serve
from mmrouter_router.http.upstream import Upstream

OTHER_TURNS = 6
"""Turns of the loop beside those that accept."""
BURST = 8 * BATCH


def in_uvloop(test):
    """Run a test in uvloop, as in a router."""

    @functools.wraps(test)
    def run(*arguments, **named) -> None:
        uvloop.run(test(*arguments, **named))

    return run


class Greeter(asyncio.Protocol):
    def __init__(self, accepted: list["Greeter"]) -> None:
        self._accepted = accepted

    def connection_made(self, transport) -> None:
        self._accepted.append(self)
        transport.write(b"hello")
        transport.close()


class Rig:
    """A listener. Clients connect synchronously: the kernel accepts them."""

    def __init__(self, host: str = "", port: int = PORT) -> None:
        self.host = host or loopback()
        self.port = port
        self.accepted: list[Greeter] = []
        self.listener = Listener(lambda: Greeter(self.accepted), self.host, port, 2048)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=10)

    async def turns_until(self, count: int, most: int) -> int:
        """Return the turns of the loop until ``count`` connections are accepted, at most ``most``."""
        for turn in range(most):
            if len(self.accepted) >= count:
                return turn
            await asyncio.sleep(0)
        return most

    async def received(self, client: socket.socket) -> bytes:
        return await asyncio.to_thread(client.recv, 100)


@in_uvloop
async def test_burst_of_connections_is_accepted_in_batches_in_few_turns_of_the_loop():
    rig = Rig()
    clients = [rig.connect() for _ in range(BURST)]
    while not rig.accepted:
        await asyncio.sleep(0)
    assert len(rig.accepted) <= BATCH
    assert await rig.turns_until(BURST, most=BURST) <= BURST / BATCH + OTHER_TURNS
    assert {await rig.received(client) for client in clients} == {b"hello"}
    for client in clients:
        client.close()
    rig.listener.close()


@in_uvloop
async def test_close_accepts_connections_in_the_kernels_queue():
    rig = Rig()
    clients = [rig.connect() for _ in range(BURST)]
    rig.listener.close()
    rig.listener.close()
    await rig.listener.wait_closed()
    assert len(rig.accepted) == len(clients)
    for client in clients:
        with closing(client):
            assert await rig.received(client) == b"hello"
    with pytest.raises(ConnectionRefusedError):
        rig.connect()


@in_uvloop
async def test_exhausted_file_descriptors_delay_connections(monkeypatch):
    monkeypatch.setattr(http_server, "RETRY_SECONDS", 0.02)
    rig = Rig()
    with closing(rig.connect()) as client:
        with no_free_descriptors():
            assert await rig.turns_until(1, most=20) == 20
        assert await rig.received(client) == b"hello"
    rig.listener.close()


@in_uvloop
async def test_listener_can_close_while_file_descriptors_are_exhausted():
    rig = Rig()
    with closing(rig.connect()) as client:
        with no_free_descriptors():
            await rig.turns_until(1, most=20)
        rig.listener.close()
        assert await rig.received(client) == b"hello"


@in_uvloop
async def test_listens_on_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            port = probe.getsockname()[1]
    except OSError as error:  # disabled in many containers
        pytest.skip(f"not run: no loopback of IPv6: {error}")
    rig = Rig("::1", port)
    with closing(rig.connect()) as client:
        assert await rig.received(client) == b"hello"
    rig.listener.close()


async def test_server_with_address_in_use_exits_with_uvicorns_status(caplog):
    with socket.create_server((loopback(), PORT)) as taken:
        server = Server(None, taken.getsockname()[0], PORT, drain_seconds=1)
        with pytest.raises(SystemExit) as ended:
            await server.serve()
    assert ended.value.code == STARTUP_FAILURE
    assert "cannot listen on" in caplog.text


OTHER_PORT = 9090


class Process:
    """The servers of one process. ``/held`` answers its first half and then waits for ``go``."""

    def __init__(self, drain_seconds: float = 20.0, notice_seconds: float = 0.0) -> None:
        self.ip, self._notice_seconds = loopback(), notice_seconds
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
        running = serve(self._clients, [self._others], self.shutdown, notice_seconds=self._notice_seconds)
        self.task = asyncio.create_task(running)
        await until(lambda: self._clients.started and self._others.started)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go.set()
        self.shutdown.stop("the test is over")
        await asyncio.wait_for(self.task, 20)

    async def pending(self, client: httpx.AsyncClient) -> asyncio.Task:
        """Return the task of a request whose answer has begun."""
        answer = asyncio.create_task(client.get(f"{self.url}/held"))
        await self.held.wait()
        return answer

    async def refuses(self) -> None:
        """Wait until a new connection is refused."""
        async with asyncio.timeout(10):
            while True:
                try:
                    _, writer = await asyncio.open_connection(self.ip, PORT)
                except (ConnectionRefusedError, ConnectionResetError):
                    return  # reset: it was in the queue of the closed socket
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
        answer = await process.pending(client)
        process.shutdown.stop("SIGTERM")
        await process.refuses()
        await asyncio.sleep(1.5)  # longer than idle connections linger
        assert (await client.get(process.other)).status_code == 200
        assert not process.task.done()
        process.go.set()
        assert (await answer).text == "one two"
        await asyncio.wait_for(process.task, 10)
        with pytest.raises(httpx.ConnectError):
            await client.get(process.other)


async def test_answer_beyond_the_drain_time_is_truncated():
    async with Process(drain_seconds=1) as process, httpx.AsyncClient(timeout=20) as client:
        answer = await process.pending(client)
        process.shutdown.stop("SIGTERM")
        with pytest.raises(httpx.RemoteProtocolError):
            await answer
        await asyncio.wait_for(process.task, 10)


async def test_server_without_connections_exits_immediately():
    async with Process(drain_seconds=600) as process:
        process.shutdown.stop("SIGTERM")
        await asyncio.wait_for(process.task, 20)  # a small part of the drain time


async def test_first_signal_drains_and_second_exits():
    async with Process(drain_seconds=600) as process, httpx.AsyncClient(timeout=20) as client:
        answer = await process.pending(client)
        os.kill(os.getpid(), signal.SIGTERM)
        await process.refuses()
        assert not process.task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(process.task, 10)
        process.go.set()
        await asyncio.gather(answer, return_exceptions=True)


async def test_during_the_notice_new_connections_are_served_and_afterwards_refused():
    async with Process(notice_seconds=2.0) as process, httpx.AsyncClient(timeout=20) as client:
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: process.shutdown.draining)
        assert not process.shutdown.stopping.is_set()
        assert (await client.get(process.url)).headers["connection"] == "close"
        await asyncio.wait_for(process.task, 20)
        with pytest.raises(httpx.ConnectError):
            await client.get(process.url)


async def test_a_second_signal_ends_the_notice_and_an_interrupt_has_none():
    for signals in ((signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)):
        async with Process(notice_seconds=600) as process:
            for number in signals:
                os.kill(os.getpid(), number)
                await until(lambda process=process: process.shutdown.draining)
            await asyncio.wait_for(process.task, 20)


@asynccontextmanager
async def no_collector():
    """Disable garbage collection, so that only reference counts free objects."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def cold(scope, receive, send) -> None:
    """Answer by ASGI."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


async def hot(client) -> None:
    try:
        await client.body(1024, unlimited())
    except asyncio.CancelledError:  # the client disconnected
        return
    await client.respond(200, [(b"content-length", b"2")], b"hi")


cold.hot = {b"/hot": hot}


@pytest.mark.parametrize("path", [b"/hot", b"/cold"])
@pytest.mark.parametrize("leaves", ["at its end", "within a body"])
@in_uvloop
async def test_client_connection_is_freed_without_garbage_collection(path, leaves):
    async with LoopbackServer(cold) as front, no_collector():
        server = front.server
        reader, writer = await asyncio.open_connection(front.ip, PORT)
        for _ in range(2):
            writer.write(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nab" % path)
            await reader.readuntil(b"hi")
        if leaves == "within a body":
            writer.write(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\na" % path)
            await until(lambda: server.server_state.tasks)
        (connection,) = (weakref.ref(each) for each in server.server_state.connections)
        writer.close()
        await until(lambda: not server.server_state.connections and not server.server_state.tasks)
        await until(lambda: connection() is None)


@in_uvloop
async def test_engine_connection_is_freed_without_garbage_collection():
    async with Engine() as engine, no_collector():
        upstream = Upstream()
        reply = await upstream.request(engine.ip, HTTP_PORT, "POST", "/", {"authorization": "none"})
        while await reply.piece():
            pass
        connection = weakref.ref(reply.connection)
        reply.close()
        del reply
        upstream.close()
        await until(lambda: connection() is None)


class Holding:
    """An application whose only route never answers."""

    hot: Final = {b"/": lambda client: asyncio.sleep(60)}


async def test_idle_connections_close_where_new_ones_exceed_the_limit_and_busy_ones_do_not() -> None:
    outcomes: list[str] = []
    front = LoopbackServer(Holding())
    front.server = Server(Holding(), front.ip, PORT, drain_seconds=1, max_connections=2, count=outcomes.append)
    request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    async with front:
        connections = front.server.server_state.connections
        clients: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for number, sent in enumerate((request, b"", request, b""), 1):
            reader, writer = await asyncio.open_connection(front.ip, PORT)
            writer.write(sent)
            clients.append((reader, writer))
            await until(lambda: len(connections) + len(outcomes) == number)  # noqa: B023 - waited for in the loop
            await until(lambda: len(connections) <= 2)
            busy = (number + 1) // 2
            await until(lambda: sum(one.cycle is not None for one in connections) == busy)  # noqa: B023
        assert outcomes == ["idle", "refused"]
        for closed, _ in (clients[1], clients[3]):
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(closed.read(), 5) == b""
        assert not any(clients[number][0].at_eof() for number in (0, 2))


@pytest.mark.parametrize(("files", "clients"), [(64, 24), (1024, 384), (4096, 1664), (1 << 20, 523_904)])
def test_the_limit_of_clients_leaves_each_a_connection_to_an_engine_and_files_for_the_rest(
    files: int, clients: int
) -> None:
    assert client_limit(files) == clients
    assert 2 * clients < files


def test_the_soft_limit_of_open_files_is_raised_and_never_lowered() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        assert raise_open_files() >= 1
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == (min(before[1], 1 << 20), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
