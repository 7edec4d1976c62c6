"""The engine client against a scripted server on loopback."""

import asyncio
import contextlib
import re
import socket
import struct

import pytest
import pytest_asyncio
import uvloop
from unit.router.rig import http_answer, refused
from waiting import until

from mmrouter_router.http.engine_connection import HEAD_LIMIT, HIGH_WATER, UpstreamError
from mmrouter_router.http.upstream import Upstream

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Engine:
    """Accepts connections and hands each request to ``answer(writer, head, body)``."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests: list[tuple[bytes, bytes]] = []
        self.answer = self.json
        self.closed = asyncio.Event()

    async def json(self, writer, head, body) -> None:
        writer.write(http_answer(200))

    def says(self, raw: bytes, *, ends: bool = False) -> None:
        """Answer every request with these bytes. ``ends``: the connection is closed after them."""

        async def answer(writer, head, body) -> None:
            writer.write(raw)
            await writer.drain()
            if ends:
                writer.transport.close()

        self.answer = answer

    def answers(self, answer) -> None:
        """Decorate how every request is answered."""
        self.answer = answer

    async def __aenter__(self) -> "Engine":
        self.server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                (length,) = re.findall(rb"content-length: (\d+)", head)
                body = await reader.readexactly(int(length))
                self.requests.append((head, body))
                await self.answer(writer, head, body)
                await writer.drain()
        self.closed.set()
        writer.close()


@pytest_asyncio.fixture
async def engine():
    async with Engine() as engine:
        yield engine


@pytest_asyncio.fixture
async def upstream():
    upstream = Upstream(connect_seconds=10)
    yield upstream
    upstream.close()


async def ask(upstream: Upstream, engine: Engine, body: bytes = b"{}"):
    return await upstream.request("127.0.0.1", engine.port, "POST", "/v1/x", {"x-a": "b"}, body)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}".encode() + b"\r\n" + data + b"\r\n"


async def test_body_arrives_unchanged_and_the_connection_is_reused(engine, upstream):
    for number in range(3):
        answer = await ask(upstream, engine, b"%d" % number)
        assert (answer.status, await answer.read(100)) == (200, b"{}")
        answer.close()
    assert engine.connections == 1
    assert [body for _, body in engine.requests] == [b"0", b"1", b"2"]
    assert b"x-a: b\r\n" in engine.requests[0][0]


async def test_an_answer_that_is_closed_twice_gives_its_connection_back_once(engine, upstream):
    first = await ask(upstream, engine, b"1")
    await first.read(100)
    first.close()
    second = await ask(upstream, engine, b"2")
    first.close()
    assert await second.read(100) == b"{}", "its connection was not ended for another answer's sake"
    second.close()
    second.close()
    assert (engine.connections, upstream.idle_connections("127.0.0.1", engine.port)) == (1, 1)


async def test_events_arrive_while_the_engine_still_writes(engine, upstream):
    proceed = asyncio.Event()

    @engine.answers
    async def stream(writer, head, body) -> None:
        writer.write(HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        await proceed.wait()
        writer.write(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

    answer = await ask(upstream, engine)
    pieces = answer.body()
    assert await anext(pieces) == b"data: 1\n\n"
    proceed.set()
    assert [piece async for piece in pieces] == [b"data: 2\n\n"]
    answer.close()


async def test_refused_connection_reports_that_nothing_was_sent(upstream):
    error = await refused(upstream.request("127.0.0.1", 1, "POST", "/", {}, b""), UpstreamError)
    assert (error.sent, error.began) == (False, False)


async def test_engine_death_before_the_answer_reports_that_the_request_was_sent(engine, upstream):
    engine.says(b"", ends=True)
    error = await refused(ask(upstream, engine), UpstreamError)
    assert (error.sent, error.began) == (True, False)


async def test_truncated_answer_is_an_error(engine, upstream):
    engine.says(HEAD + chunk(b"data: 1\n\n"), ends=True)
    answer = await ask(upstream, engine)
    pieces = answer.body()
    assert await anext(pieces) == b"data: 1\n\n"
    assert (await refused(anext(pieces), UpstreamError)).began
    answer.close()


async def test_closed_idle_connection_is_replaced_once(engine, upstream):
    (await ask(upstream, engine)).close()  # not read: dropped
    answer = await ask(upstream, engine)
    await answer.read(10)
    answer.close()
    kept = engine.connections

    @engine.answers
    async def close_idle(writer, head, body) -> None:
        if engine.connections == kept:
            writer.transport.close()
        else:
            await engine.json(writer, head, body)

    answer = await ask(upstream, engine)
    assert await answer.read(10) == b"{}"
    assert engine.connections == kept + 1


async def test_a_request_that_an_idle_connection_never_answered_is_not_sent_there_again(engine, upstream):
    """Its node is lost, so that a further connection would cost another timeout."""
    answer = await ask(upstream, engine)
    await answer.read(10)
    answer.close()
    engine.says(b"")
    asking = asyncio.create_task(ask(upstream, engine))
    await until(lambda: len(engine.requests) == 2)
    for address in upstream.active():
        upstream.end_silent(address, 0)
    async with asyncio.timeout(60):
        assert (await refused(asking, UpstreamError)).sent
    assert engine.connections == 1


async def test_slow_reader_buffers_a_bounded_amount(engine, upstream):
    piece, total = b"x" * 65536, 400
    written, out = 0, None

    @engine.answers
    async def flood(writer, head, body) -> None:
        nonlocal written, out
        out = writer.transport
        writer.write(HEAD)
        for _ in range(total):
            writer.write(chunk(piece))
            await writer.drain()
            written += 1
        writer.write(b"0\r\n\r\n")

    answer = await ask(upstream, engine)
    # Without a reader both ends must stall.
    await until(lambda: not answer.connection.transport.is_reading() and out.get_write_buffer_size())
    assert written < total
    assert answer.connection.buffered < HIGH_WATER + 2**20
    assert sum([len(p) async for p in answer.body()]) == total * len(piece)


async def test_large_request_body_arrives_completely(engine, upstream):
    body = bytes(range(256)) * 40_000
    answer = await ask(upstream, engine, body)
    await answer.read(10)
    assert engine.requests[0][1] == body


async def test_surplus_answer_is_not_taken_for_the_next_one(engine, upstream):
    second = http_answer(404, b"stolen")

    async def twice(writer, head, body):
        await engine.json(writer, head, body)
        if body != b"later":
            writer.write(second)  # with the answer, or later without a request
            return
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(second)

    for asked in (b"at once", b"later"):
        engine.answer = twice
        answer = await ask(upstream, engine, asked)
        assert (answer.status, answer.headers, await answer.read(100)) == (200, [(b"content-length", b"2")], b"{}")
        answer.close()
        await until(lambda: not upstream.idle_connections("127.0.0.1", engine.port))  # the surplus answer arrived
        engine.answer = engine.json
        answer = await ask(upstream, engine)
        assert (answer.status, await answer.read(100)) == (200, b"{}")
        answer.close()


HINTS = b"HTTP/1.1 103 Early Hints\r\nset-cookie: x\r\n\r\n"
TRAILERS = HEAD + chunk(b"ok") + b"0\r\nset-cookie: x\r\n\r\n"


@pytest.mark.parametrize("raw", [HINTS + http_answer(200, b"ok"), TRAILERS], ids=["informational answer", "trailers"])
async def test_headers_before_and_after_an_answer_are_not_its_own(engine, upstream, raw):
    engine.says(raw)
    answer = await ask(upstream, engine)
    assert (answer.status, await answer.read(10)) == (200, b"ok")
    assert b"set-cookie" not in dict(answer.headers)
    answer.close()
    assert (await ask(upstream, engine)).status == 200
    assert engine.connections == 1


ENDLESS = {
    "informational answers": (b"", HINTS),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
    "one header": (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 64),
    "trailers": (HEAD + chunk(b"ok") + b"0\r\n", b"x: y\r\n"),
}


@pytest.mark.parametrize("case", ENDLESS)
async def test_an_endless_head_ends_the_connection_with_a_reason(engine, upstream, case):
    begin, more = ENDLESS[case]
    sent = 0

    @engine.answers
    async def flood(writer, head, body):
        nonlocal sent
        writer.write(begin)
        while not writer.transport.is_closing():
            writer.write(more * 100)
            sent += len(more) * 100
            await writer.drain()

    async def read() -> None:
        answer = await ask(upstream, engine)
        await answer.read(1000)

    with pytest.raises(UpstreamError, match=f"larger than {HEAD_LIMIT} bytes|broke off"):
        await read()
    assert sent
    await asyncio.wait_for(engine.closed.wait(), 60)


async def test_early_answer_is_read_and_its_connection_not_reused(upstream):
    async def refuses(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\nno")
        await asyncio.sleep(60)

    server = await asyncio.start_server(refuses, "127.0.0.1", 0, limit=1000)
    port = server.sockets[0].getsockname()[1]
    for _ in range(2):
        async with asyncio.timeout(30):  # the engine waits for twice as long
            answer = await upstream.request("127.0.0.1", port, "POST", "/", {}, bytes(32 << 20))
            assert (answer.status, await answer.read(10)) == (413, b"no")
        answer.close()
    server.close()


async def test_close_ends_an_answer_without_length_and_reset_does_not(engine, upstream):
    reset = asyncio.Event()

    @engine.answers
    async def ends(writer, head, body) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\npart")
        await writer.drain()
        if body == b"reset":
            await reset.wait()
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        else:
            writer.close()

    assert await (await ask(upstream, engine)).read(10) == b"part"
    answer = await ask(upstream, engine, b"reset")
    assert await answer.piece() == b"part"
    reset.set()
    with pytest.raises(UpstreamError):
        await answer.piece()


async def test_closed_idle_connections_are_forgotten(engine, upstream):
    transports = []

    @engine.answers
    async def notes(writer, head, body) -> None:
        transports.append(writer.transport)
        await engine.json(writer, head, body)

    answers = [await ask(upstream, engine) for _ in range(3)]
    for answer in answers:
        await answer.read(10)
        answer.close()
    assert len(transports) == 3
    for transport in transports:
        transport.abort()
    await until(lambda: not upstream.idle_connections("127.0.0.1", engine.port))


async def test_request_header_with_line_break_is_refused(engine, upstream):
    with pytest.raises(ValueError, match="line break"):
        await upstream.request("127.0.0.1", engine.port, "POST", "/", {"x": "a\r\nevil: 1"}, b"")


def test_engine_connections_use_tcp_nodelay():
    async def run() -> None:
        upstream = Upstream()
        async with Engine() as engine:
            reply = await ask(upstream, engine)
            taken = reply.connection.transport.get_extra_info("socket")
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            reply.close()
            upstream.close()

    for loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(run())
