"""Slow, unusual and hostile clients on real sockets: their answers, and their cost in time and memory."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import socket
import struct

import pytest
import uvloop
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.client_channel import AsgiClient, ClientGoneError
from mmrouter_router.http.client_timeouts import CLIENT_TIMEOUTS, MAX_STEP_SECONDS, ProcessClock, unread_bytes
from mmrouter_router.http.connection import HEAD_LIMIT, ClientConnection
from mmrouter_router.http.server import Server

PORT = 8000
LIMIT = 80_000
EXAMPLES = 25
END = b"POST /other HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"


class Front:
    """A server that echoes what it parsed. ``hot``: whether ``/`` is served without ASGI."""

    _hosts = itertools.count(1)

    def __init__(self, *, hot: bool = True) -> None:
        self.ip = f"127.84.{os.getpid() % 250}.{next(self._hosts)}"
        self.seen: list[bytes] = []
        self.disconnected = asyncio.Event()
        self.held = 0
        self.go = asyncio.Event()
        self.server = Server(self._app(hot), self.ip, PORT, drain_seconds=1)
        self._task: asyncio.Task[None] | None = None

    def _app(self, hot: bool):
        async def app(scope, receive, send) -> None:
            client = AsgiClient(scope, receive, send)
            try:
                await self.answer(client)
            finally:
                await client.close()

        app.hot = {b"/": self.answer} if hot else {}
        return app

    async def answer(self, client) -> None:
        try:
            body, status = await self._describe(client), 200
        except RequestError as error:
            body, status = error.to_body(), error.status
        except (asyncio.CancelledError, ClientGoneError):
            self.disconnected.set()
            return
        await client.respond(status, [(b"content-length", b"%d" % len(body))], body)

    async def _describe(self, client) -> bytes:
        if (b"authorization", b"no") in client.headers:
            raise RequestError.unauthorized()  # before the body is read
        body = await client.body(LIMIT, self._grow)
        self.seen.append(bytes(body))
        if (b"x-wait", b"yes") in client.headers:
            await self.go.wait()
        names = [(name.decode(), value.decode("latin-1")) for name, value in client.headers]
        return json.dumps([client.method, client.path, names, len(body), body[:20].hex()]).encode() + b"\n"

    def _grow(self, size: int) -> None:
        self.held = size

    async def start(self) -> "Front":
        self._task = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.002)
        return self

    async def stop(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        for server in self.server.servers:
            server.close()
        for connection in tuple(self.server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(self._task, *self.server.server_state.tasks, return_exceptions=True)

    __aenter__, __aexit__ = start, stop

    def look(self, now: float) -> None:
        for connection in tuple(self.server.server_state.connections):
            connection.check_timeouts(CLIENT_TIMEOUTS, now)

    async def connected(self, count: int) -> None:
        await until(lambda: len(self.server.server_state.connections) == count)

    def connection(self) -> ClientConnection:
        (connection,) = self.server.server_state.connections
        return connection

    def received(self) -> int:
        return self.connection().body_received


async def until(condition) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def connected(front: Front):
    reader, writer = await asyncio.open_connection(front.ip, PORT)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_to(front: Front, raw: bytes, cuts: list[int] | None = None) -> bytes:
    """Return all that a client receives until its connection is closed."""
    async with connected(front) as (reader, writer), asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            for start, end in itertools.pairwise((0, *sorted(cuts or ()), None)):
                writer.write(raw[start:end])
                await writer.drain()
                await asyncio.sleep(0)
        return re.sub(rb"date: [^\r]*\r\n", b"", await reader.read())


# -- hot path and ASGI path --------------------------------------------------------------------------------------------

HEADERS = [
    b"x: \xff\xfe",
    b"authorization: Bearer a\r\nAuthorization: Bearer b",
    b"authorization: no",
    b"connection: close",
    b"connection: keep-alive",
    b"expect: 100-continue",
    b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA",
    b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x",
    b"upgrade: h2c",
    b"te: trailers",
    b"x-long: " + b"a" * 5000,
]
FRAMED = [
    b"content-length: 3\r\n\r\nabc",
    b"content-length: 0\r\n\r\n",
    b"content-length: 000003\r\n\r\nabc",
    b"content-length: 80000\r\n\r\n" + b"z" * LIMIT,
    b"content-length: 80001\r\n\r\n" + b"z" * (LIMIT + 1),
    b"content-length: 66000\r\n\r\n" + b"z" * 66_000,
    b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"transfer-encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nx-late: 1\r\nauthorization: no\r\n\r\n",
    b"transfer-encoding: gzip, chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
    # Invalid HTTP.
    b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
    b"content-length: -3\r\n\r\nabc",
    b"content-length: 99999999999999999999999\r\n\r\nabc",
    b"transfer-encoding: gzip\r\n\r\nabc",
    b"transfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    b"transfer-encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n",
    b"content-length : 3\r\n\r\nabc",
    b"x: a\0b\r\n\r\n",
    b"x-\xe4: a\r\n\r\n",
    b" folded: x\r\n\r\n",
]
LINES = [
    b"POST / HTTP/1.1",
    b"POST / HTTP/1.0",
    b"POST /?a=b HTTP/1.1",
    b"POST http://x/ HTTP/1.1",
    b"POST //x HTTP/1.1",
    b"POST /%2e HTTP/1.1",
    b"POST /\xff HTTP/1.1",
    b"POST * HTTP/1.1",
    b"CONNECT x:80 HTTP/1.1",
    b"OPTIONS / HTTP/1.1",
    b"HEAD / HTTP/1.1",
    b"FOO / HTTP/1.1",
    b"POST / HTTP/2.0",
    b"POST /",
    b"\r\n\r\nPOST / HTTP/1.1",
]


def request(line: bytes, headers: list[bytes], framed: bytes) -> bytes:
    return b"\r\n".join((line, b"host: x", *headers, framed))


@st.composite
def requests(draw) -> bytes:
    usual = st.just(LINES[0])
    line = draw(st.one_of(usual, usual, st.sampled_from(LINES)))
    # No request may follow one that closes its connection.
    line = line if line.endswith(b"1.1") else LINES[0]
    headers = [header for header in HEADERS if header != b"connection: close"]
    return request(line, draw(st.lists(st.sampled_from(headers), max_size=2)), draw(st.sampled_from(FRAMED)))


class Pair:
    """The same application on the hot path and on the ASGI path."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner, self._fronts = runner, (Front(), Front(hot=False))

    async def _both(self, raw: bytes, cuts: list[int]) -> list[bytes]:
        return [await answer_to(front, raw + END, cuts) for front in self._fronts]

    def same(self, raw: bytes, cuts: list[int]) -> bytes:
        """Return the answer of both, which must be equal."""
        ours, servers = self._runner.run(self._both(raw, cuts))
        if ours != servers:
            pytest.fail(f"{ours[:400]!r} is not {servers[:400]!r}")
        return ours

    def run(self, name: str) -> None:
        for front in self._fronts:
            self._runner.run(getattr(front, name)())


@pytest.fixture(scope="module")
def pair():
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in a router
        made = Pair(runner)
        made.run("start")
        yield made
        made.run("stop")


@pytest.mark.parametrize("line", LINES)
def test_every_request_line_is_answered_as_by_asgi(pair, line):
    answer = pair.same(request(line, [], FRAMED[0]), [])
    assert answer.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in answer


@pytest.mark.parametrize("framed", FRAMED)
def test_every_framing_is_answered_as_by_asgi(pair, framed):
    answer = pair.same(request(LINES[0], [], framed), [])
    assert re.match(rb"HTTP/1.1 (200|400|413) ", answer)


@pytest.mark.parametrize("header", HEADERS)
def test_every_header_is_answered_as_by_asgi(pair, header):
    for framed in (FRAMED[0], FRAMED[6]):
        assert re.search(rb"HTTP/1.1 (200|401) ", pair.same(request(LINES[0], [header], framed), [30, 31]))


@given(st.lists(requests(), min_size=1, max_size=3), st.lists(st.integers(1, 700), max_size=3))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([request(LINES[0], [HEADERS[6]], FRAMED[0])] * 3, [])
def test_pipelined_requests_are_answered_as_by_asgi_for_any_fragmentation(pair, raws, cuts):
    pair.same(b"".join(raws), cuts)


@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize("cuts", [[], [60, 150]])
async def test_upgrade_offer_is_answered_in_http_1_1(hot, cuts):
    async with Front(hot=hot) as front:
        for framed in (FRAMED[0], FRAMED[3], FRAMED[6]):
            raw = request(LINES[0], [HEADERS[6]], framed)
            assert (await answer_to(front, raw + END, cuts)).count(b" 200 OK") == 2
    assert front.seen == [b"abc", b"", b"z" * LIMIT, b"", b"abc", b""]


@pytest.mark.parametrize("hot", [True, False])
async def test_trailers_are_not_request_headers(hot):
    async with Front(hot=hot) as front:
        answer = await answer_to(front, request(LINES[0], [], FRAMED[7]) + END)
    assert b" 200 OK" in answer
    assert b"x-late" not in answer


# -- endless input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (POST, b"x: y\r\n"),
        (POST + b"x: ", b"a"),
        (b"POST /?", b"a"),
        (POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"x: y\r\n"),
        (POST + b"transfer-encoding: chunked\r\n\r\n1;", b"a"),
        (b"", b"\r\n"),
    ],
)
async def test_endless_input_is_refused_before_it_takes_memory(hot, begin, more):
    endless = more * (HEAD_LIMIT // len(more))
    async with Front(hot=hot) as front, connected(front) as (reader, writer), asyncio.timeout(10):
        writer.write(begin)
        answer = asyncio.create_task(reader.readuntil(b"\r\n"))
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not (answer.done() or writer.is_closing()) and sent < 64 << 20:
                writer.write(endless)
                await writer.drain()
                sent += len(endless)
        assert (await answer).startswith(b"HTTP/1.1 431 ")
        assert sent < 4 << 20


@pytest.mark.parametrize("cuts", [[], [100, 40_000]])
async def test_head_limit_does_not_depend_on_fragmentation(cuts):
    async with Front() as front:
        for size, status in ((HEAD_LIMIT - 1000, b"200"), (HEAD_LIMIT + 1000, b"431")):
            raw = request(LINES[0], [b"x: " + b"a" * size], b"content-length: 80000\r\n\r\n" + b"z" * LIMIT)
            assert (await answer_to(front, raw + END, cuts)).startswith(b"HTTP/1.1 %b " % status)


# -- timeouts ----------------------------------------------------------------------------------------------------------

LATER = 1e6


@pytest.mark.parametrize("begin", [b"", POST, request(LINES[0], [], FRAMED[0]) + b"POST"])
async def test_connection_without_a_request_times_out(begin):
    async with Front() as front, connected(front) as (reader, writer):
        writer.write(begin)
        await front.connected(1)
        if begin.endswith(b"POST"):
            await reader.readuntil(b"]\n")
            writer.write(b" ")
        await until(lambda: not begin or front.connection().unparsed)
        front.look(LATER)
        front.look(LATER + CLIENT_TIMEOUTS.head_seconds)
        await front.connected(1)
        front.look(LATER + CLIENT_TIMEOUTS.head_seconds + 1)
        assert await asyncio.wait_for(reader.read(), 5) == b""


BODIES = [
    b"content-length: 100\r\n\r\n12345",
    b"content-length: 80000\r\n\r\n12345",
    b"transfer-encoding: chunked\r\n\r\n5\r\n12345\r\n",
]


@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize("body", BODIES)
async def test_stalled_body_times_out_with_408(hot, body):
    async with Front(hot=hot) as front, connected(front) as (reader, writer):
        writer.write(POST + body)
        # An ASGI request always waits for its body; the task of a hot request may not have started yet.
        await until(lambda: front.received() == 5 and getattr(front.connection().cycle, "waiting", front.held))
        front.look(LATER)
        front.look(LATER + CLIENT_TIMEOUTS.body_stall_seconds)
        assert len(front.server.server_state.connections) == 1
        front.look(LATER + CLIENT_TIMEOUTS.body_stall_seconds + 1)
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer


@pytest.mark.parametrize("hot", [True, False])
async def test_slow_steady_body_is_read_completely(hot):
    async with Front(hot=hot) as front, connected(front) as (reader, writer):
        step = LIMIT // 3
        writer.write(POST + b"content-length: %d\r\n\r\n" % (step * 3))
        for number in range(3):
            front.look(LATER + number)
            writer.write(bytes(step))
            await writer.drain()
            await until(lambda number=number: front.seen or front.received() == step * (number + 1))
        front.look(LATER + CLIENT_TIMEOUTS.body_stall_seconds + 14)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_remainder_of_a_refused_body_times_out():
    async with Front() as front, connected(front) as (reader, writer):
        writer.write(POST + b"content-length: %d\r\n\r\n" % (LIMIT + 1))
        assert b" 413 " in await reader.readuntil(b"}}")
        writer.write(b"a few bytes")  # which end uvicorn's keep-alive timer
        await until(lambda: front.connection().timeout_keep_alive_task is None)
        front.look(LATER)
        front.look(LATER + CLIENT_TIMEOUTS.head_seconds + 1)
        assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_client_that_waits_for_the_router_never_times_out():
    async with Front() as front, connected(front) as (reader, writer):
        writer.write(request(LINES[0], [b"x-wait: yes"], FRAMED[0]) + POST)  # and a part of the next request
        await until(lambda: front.seen)
        for number in range(3):
            front.look(LATER * (1 + number))
        front.go.set()
        assert b" 200 " in await reader.readuntil(b"]\n")
        writer.write(FRAMED[0])
        assert b" 200 " in await reader.readuntil(b"]\n")


async def test_server_checks_timeouts_on_its_ticks():
    async with Front() as front, connected(front) as (_reader, _):
        await front.connected(1)
        looks: list[float] = []
        connection = next(iter(front.server.server_state.connections))
        connection.check_timeouts = lambda patience, now: looks.append(now)
        for _ in range(2):
            await front.server.on_tick(10)
        assert 0 <= looks[0] < looks[1]
        del connection.check_timeouts


@given(st.lists(st.floats(0, 1000)))
def test_process_clock_stops_while_the_process_is_stalled(pauses):
    clock, now, shown = ProcessClock(), 5000.0, [0.0]
    assert clock.advance(now) == 0
    for pause in pauses:
        now += pause
        shown.append(clock.advance(now))
    steps = [after - before for before, after in itertools.pairwise(shown)]
    assert steps == pytest.approx([min(pause, MAX_STEP_SECONDS) for pause in pauses], abs=1e-6)


# -- end of a connection -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [POST + b"connection: close\r\n", POST.replace(b"1.1", b"1.0")])
@pytest.mark.parametrize("refused", [b"authorization: no\r\ncontent-length: 300000", b"content-length: 4000000"])
async def test_sending_client_gets_the_answer_that_closes_its_connection(begin, refused):
    body = bytes(int(refused.split()[-1]))
    async with Front() as front:
        for _ in range(3):
            answer = await answer_to(front, begin + refused + b"\r\n\r\n" + body)
            assert re.match(rb"HTTP/1.1 (401|413) ", answer)
            assert answer.endswith(b"}}")


@pytest.mark.parametrize("hot", [True, False])
async def test_invalid_input_is_refused_after_the_pending_answer(hot):
    async def streams(client) -> None:
        await client.body(LIMIT, lambda size: None)
        await client.stream(200, [], b"one", Slow())

    class Slow:
        def remaining(self) -> None:
            return None

        async def piece(self) -> bytes:
            await front.go.wait()
            return b""

        async def pour(self, sink) -> None:
            await self.piece()

    async with Front(hot=hot) as front:
        front.answer = streams
        if hot:
            front.server.config.app.hot = {b"/": streams}
        async with connected(front) as (reader, writer):
            writer.write(request(LINES[0], [], FRAMED[0]))
            await reader.readuntil(b"one\r\n")
            writer.write(b"no request\r\n\r\n")
            await until(lambda: front.connection().input_ended)
            front.go.set()
            assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"0\r\n\r\nHTTP/1.1 400 ")


async def test_exit_answers_pending_requests_and_reads_pending_bodies():
    async with Front() as front, contextlib.AsyncExitStack() as stack:
        waits, sends, idle = [await stack.enter_async_context(connected(front)) for _ in range(3)]
        waits[1].write(request(LINES[0], [b"x-wait: yes"], FRAMED[0]))
        sends[1].write(POST + b"content-length: %d\r\n\r\n" % LIMIT + b"z" * 10)
        await until(lambda: front.seen and front.held == LIMIT)
        await front.connected(3)
        front.server.should_exit = True
        assert await asyncio.wait_for(idle[0].read(), 5) == b""
        sends[1].write(b"z" * (LIMIT - 10))
        front.go.set()
        for reader, _ in (waits, sends):
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in answer
    assert [len(body) for body in front.seen] == [3, LIMIT]


async def test_reset_within_a_body_leaves_no_task_or_connection():
    async with Front() as front:
        for body in BODIES:
            front.held, front.disconnected = 0, asyncio.Event()
            async with connected(front) as (_, writer):
                writer.write(POST + body)
                await until(lambda: front.held)
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            await asyncio.wait_for(front.disconnected.wait(), 5)
            await front.connected(0)
            assert not front.server.server_state.tasks


class Endless:
    """An endless answer, poured as the router's engine connections do."""

    def __init__(self) -> None:
        self.cut = asyncio.Event()

    def remaining(self) -> None:
        return None

    async def piece(self) -> bytes:
        return bytes(65536)

    async def pour(self, sink) -> None:
        room = asyncio.Event()
        sink.when_writable(room.set)
        try:
            while True:
                room.clear()
                sink.write(bytes(65536))
                await (room.wait() if sink.full else asyncio.sleep(0))
        finally:
            self.cut.set()


@pytest.mark.parametrize("hot", [True, False])
async def test_client_that_reads_nothing_is_aborted_and_slow_reader_is_not(hot):
    endless = Endless()

    async def streams(client) -> None:
        try:
            await client.body(LIMIT, lambda size: None)
            await client.stream(200, [], b"one", endless)
        except asyncio.CancelledError:
            endless.cut.set()

    async with Front(hot=hot) as front:
        front.answer = streams
        front.server.config.app.hot = {b"/": streams} if hot else {}
        with socket.create_connection((front.ip, PORT)) as made:
            made.sendall(request(LINES[0], [], FRAMED[0]))
            await front.connected(1)
            connection = front.connection()
            now, before, still = LATER, -1, 0
            async with asyncio.timeout(20):
                # Count turns of the loop: elapsed time proves nothing on a busy machine.
                while not connection.flow.write_paused or still < 25:
                    await asyncio.sleep(0.002)
                    still = still + 1 if unread_bytes(connection.transport) == before else 0
                    before = unread_bytes(connection.transport)
            for _ in range(3):
                front.look(now)
                now += CLIENT_TIMEOUTS.answer_stall_seconds - 1
                made.recv(262_144)  # too little for the buffer to drain
                await until(lambda before=before: unread_bytes(connection.transport) != before)
                before = unread_bytes(connection.transport)
            front.look(now)
            assert not endless.cut.is_set()
            front.look(now + CLIENT_TIMEOUTS.answer_stall_seconds + 1)
            await asyncio.wait_for(endless.cut.wait(), 5)
            await front.connected(0)
