"""The engine client against a scripted server on loopback."""

import asyncio
import contextlib
import socket
import struct

import pytest
import pytest_asyncio
import uvloop

from mmrouter_router.http.upstream import HIGH_WATER, Upstream, UpstreamError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Engine:
    """Accepts connections and hands each request to ``answer(writer, head, body)``."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests: list[tuple[bytes, bytes]] = []
        self.answer = self.json
        self.closed = asyncio.Event()

    async def json(self, writer, head, body) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")
                )
                body = await reader.readexactly(length)
                self.requests.append((head, body))
                await self.answer(writer, head, body)
                await writer.drain()
        self.closed.set()
        writer.close()


@pytest_asyncio.fixture
async def engine():
    engine = Engine()
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    engine.port = server.sockets[0].getsockname()[1]
    yield engine
    server.close()


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


async def test_events_arrive_while_the_engine_still_writes(engine, upstream):
    proceed = asyncio.Event()

    async def stream(writer, head, body):
        writer.write(HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        await proceed.wait()
        writer.write(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

    engine.answer = stream
    answer = await ask(upstream, engine)
    pieces = answer.body()
    assert await anext(pieces) == b"data: 1\n\n"
    proceed.set()
    assert [piece async for piece in pieces] == [b"data: 2\n\n"]
    answer.close()


async def test_refused_connection_reports_that_nothing_was_sent(upstream):
    with pytest.raises(UpstreamError) as caught:
        await upstream.request("127.0.0.1", 1, "POST", "/", {}, b"")
    assert (caught.value.sent, caught.value.began) == (False, False)


async def test_engine_death_before_the_answer_reports_that_the_request_was_sent(engine, upstream):
    async def die(writer, head, body):
        writer.transport.abort()

    engine.answer = die
    with pytest.raises(UpstreamError) as caught:
        await ask(upstream, engine)
    assert (caught.value.sent, caught.value.began) == (True, False)


async def test_truncated_answer_is_an_error(engine, upstream):
    async def half(writer, head, body):
        writer.write(HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        writer.transport.close()

    engine.answer = half
    answer = await ask(upstream, engine)
    pieces = answer.body()
    assert await anext(pieces) == b"data: 1\n\n"
    with pytest.raises(UpstreamError) as caught:
        await anext(pieces)
    assert caught.value.began
    answer.close()


async def test_closed_idle_connection_is_replaced_once(engine, upstream):
    (await ask(upstream, engine)).close()  # not read: dropped
    answer = await ask(upstream, engine)
    await answer.read(10)
    answer.close()
    kept = engine.connections

    async def close_idle(writer, head, body):
        if engine.connections == kept:
            writer.transport.close()
        else:
            await engine.json(writer, head, body)

    engine.answer = close_idle
    answer = await ask(upstream, engine)
    assert await answer.read(10) == b"{}"
    assert engine.connections == kept + 1


async def test_closing_an_unread_answer_disconnects_the_engine(engine, upstream):
    async def endless(writer, head, body):
        writer.write(HEAD)
        while not writer.transport.is_closing():
            writer.write(chunk(b"x"))
            await writer.drain()
            await asyncio.sleep(0)
        raise ConnectionError

    engine.answer = endless
    answer = await ask(upstream, engine)
    await anext(answer.body())
    answer.close()
    await asyncio.wait_for(engine.closed.wait(), 20)


async def test_slow_reader_buffers_a_bounded_amount(engine, upstream):
    piece, total = b"x" * 65536, 400
    written, out = 0, None

    async def flood(writer, head, body):
        nonlocal written, out
        out = writer.transport
        writer.write(HEAD)
        for _ in range(total):
            writer.write(chunk(piece))
            await writer.drain()
            written += 1
        writer.write(b"0\r\n\r\n")

    engine.answer = flood
    answer = await ask(upstream, engine)
    async with asyncio.timeout(10):  # without a reader both ends must stall
        while answer.connection.transport.is_reading() or not out.get_write_buffer_size():
            await asyncio.sleep(0.001)
    assert written < total
    assert answer.connection.buffered < HIGH_WATER + 2**20
    assert sum([len(p) async for p in answer.body()]) == total * len(piece)


async def test_large_request_body_arrives_completely(engine, upstream):
    body = bytes(range(256)) * 40_000
    answer = await ask(upstream, engine, body)
    await answer.read(10)
    assert engine.requests[0][1] == body


async def test_informational_answers_are_skipped(engine, upstream):
    async def early(writer, head, body):
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    engine.answer = early
    answer = await ask(upstream, engine)
    assert (answer.status, await answer.read(10)) == (200, b"ok")


async def test_surplus_answer_is_not_taken_for_the_next_one(engine, upstream):
    second = b"HTTP/1.1 404 Not Found\r\ncontent-length: 6\r\n\r\nstolen"

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
        async with asyncio.timeout(20):
            while upstream.idle_connections("127.0.0.1", engine.port):  # until the surplus answer arrived
                await asyncio.sleep(0.001)
        engine.answer = engine.json
        answer = await ask(upstream, engine)
        assert (answer.status, await answer.read(100)) == (200, b"{}")
        answer.close()


async def test_trailers_are_not_answer_headers(engine, upstream):
    async def trails(writer, head, body):
        writer.write(HEAD + chunk(b"ok") + b"0\r\nset-cookie: x\r\n\r\n")

    engine.answer = trails
    answer = await ask(upstream, engine)
    assert await answer.read(10) == b"ok"
    assert b"set-cookie" not in dict(answer.headers)
    answer.close()
    assert (await ask(upstream, engine)).status == 200
    assert engine.connections == 1


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

    async def ends(writer, head, body):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\npart")
        await writer.drain()
        if body == b"reset":
            await reset.wait()
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        else:
            writer.close()

    engine.answer = ends
    assert await (await ask(upstream, engine)).read(10) == b"part"
    answer = await ask(upstream, engine, b"reset")
    assert await answer.piece() == b"part"
    reset.set()
    with pytest.raises(UpstreamError):
        await answer.piece()


async def test_closed_idle_connections_are_forgotten(engine, upstream):
    transports = []

    async def notes(writer, head, body):
        transports.append(writer.transport)
        await engine.json(writer, head, body)

    engine.answer = notes
    answers = [await ask(upstream, engine) for _ in range(3)]
    for answer in answers:
        await answer.read(10)
        answer.close()
    assert len(transports) == 3
    for transport in transports:
        transport.abort()
    async with asyncio.timeout(15):
        while upstream.idle_connections("127.0.0.1", engine.port):
            await asyncio.sleep(0.001)


async def test_request_header_with_line_break_is_refused(engine, upstream):
    with pytest.raises(ValueError, match="line break"):
        await upstream.request("127.0.0.1", engine.port, "POST", "/", {"x": "a\r\nevil: 1"}, b"")


def test_engine_connections_use_tcp_nodelay():
    async def run() -> None:
        server = await asyncio.start_server(Engine(), "127.0.0.1", 0)
        upstream = Upstream()
        reply = await upstream.request("127.0.0.1", server.sockets[0].getsockname()[1], "POST", "/", {})
        taken = reply.connection.transport.get_extra_info("socket")
        assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        reply.close()
        upstream.close()
        server.close()

    for loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(run())
