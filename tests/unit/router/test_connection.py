"""Client connections: forwarding of answers, large bodies, back pressure, freeing without the garbage collector."""

import asyncio
import contextlib
import gc
import itertools
import os
import random
import sys
import weakref
from contextlib import contextmanager

import httptools
import pytest
import pytest_asyncio
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.router.engine import Engine as JsonEngine
from unit.router.test_upstream import HEAD, Engine, chunk

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.client_channel import AsgiClient
from mmrouter_router.http.server import Server
from mmrouter_router.http.upstream import HIGH_WATER, Upstream, UpstreamError

PORT = 8000
ASK = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
PIECE = 64 * 1024
LIMIT = 600_000


class App:
    """An application with one hot path; other requests take the ASGI path and are answered with ``asgi <length>``."""

    def __init__(self, hot) -> None:
        self.hot = {b"/": hot}

    async def __call__(self, scope, receive, send) -> None:
        client = AsgiClient(scope, receive, send)
        body = b"asgi %d" % len(await client.body(LIMIT, lambda size: None))
        await client.respond(200, [(b"content-length", b"%d" % len(body))], body)
        await client.close()


class Front:
    """A server that forwards an engine's answer as the router does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ip = f"127.83.{os.getpid() % 250}.1"
        self.upstream = Upstream(connect_seconds=10)
        self.failed: list[BaseException] = []
        self.bodies: list[bytes] = []
        self.sizes: list[int] = []
        self.disconnects = 0
        self.server = Server(App(self._direct), self.ip, PORT, drain_seconds=1)
        self._task: asyncio.Task[None] | None = None

    async def _direct(self, client) -> None:
        try:
            self.bodies.append(await client.body(LIMIT, self.sizes.append))
        except asyncio.CancelledError:
            self.disconnects += client.gone
            raise
        except RequestError as error:
            body = error.to_body()
            await client.respond(error.status, [(b"content-length", b"%d" % len(body))], body)
            return
        answer = await self.upstream.request("127.0.0.1", self.engine.port, "POST", "/", {})
        try:
            headers = [(name, value) for name, value in answer.headers if name != b"transfer-encoding"]
            await client.stream(answer.status, headers, await answer.piece(), answer)
        except UpstreamError as error:
            self.failed.append(error)
        except asyncio.CancelledError:
            self.disconnects += client.gone
        finally:
            answer.close()

    async def __aenter__(self) -> "Front":
        self._task = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.002)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()  # faster than a shutdown, which test_server covers
        for server in self.server.servers:
            server.close()
        for connection in tuple(self.server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(self._task, *self.server.server_state.tasks, return_exceptions=True)
        self.upstream.close()


class Client:
    """Parses the answers of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.bodies: list[bytearray] = []
        self.ended = 0
        self._parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.bodies.append(bytearray())

    def on_body(self, body: bytes) -> None:
        self.bodies[-1] += body

    def on_message_complete(self) -> None:
        self.ended += 1

    async def read(self, answers: int) -> list[bytearray]:
        while self.ended < answers:
            if not (data := await self.reader.read(PIECE)):
                break
            self.feed(data)
        return self.bodies

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)


@contextlib.asynccontextmanager
async def running_front():
    engine = Engine()
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    engine.port = server.sockets[0].getsockname()[1]
    async with Front(engine) as made:
        yield made
    server.close()


@pytest_asyncio.fixture
async def front():
    async with running_front() as made:
        yield made


@contextlib.asynccontextmanager
async def client(front: Front):
    reader, writer = await asyncio.open_connection(front.ip, PORT)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def engine_answers(front: Front, pieces: list[bytes], *, chunked: bool = True, apart: float | None = None) -> None:
    async def answer(writer, head, body) -> None:
        length = b"content-length: %d" % sum(map(len, pieces))
        writer.write(HEAD if chunked else b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n")
        for piece in pieces:
            writer.write(chunk(piece) if chunked else piece)
            if apart is not None:
                await writer.drain()
                await asyncio.sleep(apart)
        if chunked:
            writer.write(b"0\r\n\r\n")

    front.engine.answer = answer


@pytest.mark.parametrize("chunked", [True, False])
@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=6))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_client_gets_the_engines_bytes_for_any_chunking(chunked, pieces):
    async def forwarded() -> list[bytearray]:
        async with running_front() as front, client(front) as made:
            engine_answers(front, pieces, chunked=chunked, apart=0)
            made.writer.write(ASK)
            bodies = await made.read(1)
            assert made.ended == 1
        return bodies

    assert asyncio.run(forwarded()) == [b"".join(pieces)]


async def test_each_piece_reaches_the_client_before_the_next_is_sent(front):
    taken: asyncio.Queue[None] = asyncio.Queue()

    async def answer(writer, head, body) -> None:
        writer.write(HEAD)
        for number in range(20):
            writer.write(chunk(b"<%d>" % number))
            await asyncio.wait_for(taken.get(), 5)  # set by the client
        writer.write(b"0\r\n\r\n")

    front.engine.answer = answer
    async with client(front) as made:
        made.writer.write(ASK)
        for number in range(20):
            await made.reader.readuntil(b"<%d>" % number)
            taken.put_nowait(None)
        await made.reader.readuntil(b"0\r\n\r\n")


async def test_sequential_and_pipelined_requests_share_one_connection(front):
    engine_answers(front, [b"one", b"two"], apart=0.001)
    async with client(front) as made:
        made.writer.write(ASK)
        assert await made.read(1) == [b"onetwo"]
        made.writer.write(ASK)
        assert await made.read(2) == [b"onetwo"] * 2
        assert front.engine.connections == 1  # the answer was read to its end
        made.writer.write(ASK + ASK)
        assert await made.read(4) == [b"onetwo"] * 3 + [b"asgi 0"]  # the pipelined one takes the ASGI path


async def test_slow_client_buffers_a_bounded_amount_and_gets_everything(front):
    sent = 0

    async def answer(writer, head, body) -> None:
        nonlocal sent
        writer.write(HEAD)
        for _ in range(800):
            writer.write(chunk(bytes(PIECE)))
            await writer.drain()
            sent += PIECE
        writer.write(b"0\r\n\r\n")

    front.engine.answer = answer
    async with client(front) as made:
        made.writer.write(ASK)
        before, still = 0, 0
        async with asyncio.timeout(20):
            # Wait until nothing moves, in turns of the loop: elapsed time proves nothing on a busy machine.
            while still < 50:
                await asyncio.sleep(0.002)
                still = still + 1 if sent == before > HIGH_WATER else 0
                before = sent
        # The kernel's buffers of two connections, and little more of the router's.
        assert HIGH_WATER < sent < 400 * PIECE
        assert sum(map(len, await made.read(1))) == 800 * PIECE


async def test_client_disconnect_aborts_the_engines_request(front):
    async def answer(writer, head, body) -> None:
        writer.write(HEAD)
        while not writer.is_closing():
            writer.write(chunk(b"more"))
            await writer.drain()
            await asyncio.sleep(0.005)
        raise ConnectionError

    front.engine.answer = answer
    async with client(front) as made:
        made.writer.write(ASK)
        await made.reader.readuntil(b"more")
    await asyncio.wait_for(front.engine.closed.wait(), 5)
    assert front.disconnects == 1


async def test_truncated_engine_answer_is_truncated_for_the_client(front):
    taken = asyncio.Event()

    async def answer(writer, head, body) -> None:
        writer.write(HEAD + chunk(b"a part"))
        await taken.wait()
        writer.transport.abort()
        raise ConnectionError

    front.engine.answer = answer
    async with client(front) as made:
        made.writer.write(ASK)
        while not any(made.bodies):
            made.feed(await made.reader.read(PIECE))
        taken.set()
        assert await made.read(1) == [b"a part"]
        assert made.ended == 0
    assert [str(error) for error in front.failed] == ["the engine broke off its answer"]


CUTS = st.lists(st.integers(1, 400), max_size=5)


@given(st.lists(st.tuples(st.binary(max_size=300), CUTS, st.booleans()), min_size=1, max_size=5))
@settings(max_examples=4, deadline=None)
def test_body_is_complete_for_any_fragmentation_and_framing(cases):
    async def received() -> list[bytes]:
        async with running_front() as front, client(front) as made:
            engine_answers(front, [b"ok"])
            for number, (body, cuts, chunked) in enumerate(cases, 1):
                how = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
                framed = (chunk(body) if body else b"") + b"0\r\n\r\n" if chunked else body
                message = b"POST / HTTP/1.1\r\nhost: x\r\n" + how + b"\r\n\r\n" + framed
                for start, end in itertools.pairwise((0, *sorted(cuts), None)):
                    made.writer.write(message[start:end])
                    await made.writer.drain()
                    await asyncio.sleep(0)
                assert (await made.read(number))[-1] == b"ok"
                assert front.sizes[-1] == len(body)
        return front.bodies

    assert asyncio.run(received()) == [body for body, _, _ in cases]


@pytest.mark.parametrize("sent_first", [0, 1, 300_000, 2_000_000])
async def test_large_body_bypasses_the_parser_and_the_next_request_does_not(front, monkeypatch, sent_first):
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 4_000_000)
    engine_answers(front, [b"ok"])
    body = random.Random(1).randbytes(3_000_000)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with client(front) as made:
        made.writer.write(head + body[:sent_first])
        await made.writer.drain()
        await asyncio.sleep(0.01)
        made.writer.write(body[sent_first:] + ASK)  # the next request follows the last byte directly
        assert await made.read(2) in ([b"ok", b"ok"], [b"ok", b"asgi 0"])
        made.writer.write(head + body)
        assert (await made.read(3))[2] == b"ok"
    assert [bytes(one) for one in front.bodies if one] == [body, body]


async def test_disconnect_within_a_large_body_cancels_the_request(front):
    async with client(front) as made:
        made.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % LIMIT)
        made.writer.write(bytes(LIMIT // 2))
        await made.writer.drain()
        while not front.sizes:
            await asyncio.sleep(0.001)
    while not front.disconnects:
        await asyncio.sleep(0.001)
    assert front.bodies == []


@pytest.mark.parametrize("announced", [True, False])
async def test_oversized_body_is_refused_and_the_connection_stays_usable(front, announced):
    engine_answers(front, [b"ok"])
    size = LIMIT + 1
    how = b"content-length: %d" % size if announced else b"transfer-encoding: chunked"
    async with client(front) as made:
        made.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n" + how + b"\r\n\r\n")
        if announced:
            assert b"request_too_large" in (await made.read(1))[0]  # before the body is sent
            made.writer.write(bytes(size))
        else:
            made.writer.write(chunk(bytes(size)))
            assert b"request_too_large" in (await made.read(1))[0]
            made.writer.write(b"0\r\n\r\n")
        made.writer.write(ASK)
        assert (await made.read(2))[1] == b"ok"
    assert front.bodies == [b""]


@pytest.mark.parametrize(
    "unusual",
    [
        b"POST /?a=b HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc",
        b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc",
        b"POST /other HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc",
    ],
)
async def test_unusual_requests_take_the_asgi_path(front, unusual):
    engine_answers(front, [b"ok"])
    async with client(front) as made:
        made.writer.write(unusual)
        assert await made.read(1) == [b"asgi 3"]
    async with client(front) as made:
        made.writer.write(ASK + unusual)  # pipelined
        assert await made.read(2) == [b"ok", b"asgi 3"]


async def test_http_1_0_client_gets_an_unchunked_answer_ended_by_close(front):
    for chunked, apart in itertools.product((True, False), (None, 0.001)):
        engine_answers(front, [b"one", b"two"], chunked=chunked, apart=apart)
        async with client(front) as made:
            made.writer.write(b"POST / HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 3\r\n\r\nabc")
            head, _, body = (await made.reader.read()).partition(b"\r\n\r\n")
            assert (body, b"chunked" in head, b"connection: close" in head) == (b"onetwo", False, True)


async def test_expect_100_continue_is_answered(front):
    async with client(front) as made:
        made.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
        assert (await made.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        made.writer.write(b"abc")
        assert await made.read(1) == [b"asgi 3"]


async def test_failing_handler_is_a_500_and_missing_answer_closes_the_connection(front):
    async def fails(client) -> None:
        raise ZeroDivisionError

    async def forgets(client) -> None:
        await client.body(LIMIT, lambda size: None)

    for handler, answers in ((fails, [b"Internal Server Error"]), (forgets, [])):
        front.server.config.app.hot = {b"/": handler}
        async with client(front) as made:
            made.writer.write(ASK)
            assert await made.read(1) == answers
            assert await made.reader.read() == b""


async def test_header_with_line_break_is_never_sent(front):
    async def breaks(client) -> None:
        await client.respond(200, [(b"content-length", b"0"), (b"x", b"a\r\nset-cookie: b")], b"")

    front.server.config.app.hot = {b"/": breaks}
    async with client(front) as made:
        made.writer.write(ASK)
        head = await made.reader.read()
    assert b"set-cookie" not in head


async def test_default_headers_are_sent_and_server_exit_closes_the_connection(front):
    engine_answers(front, [b"ok"])
    async with client(front) as made:
        made.writer.write(ASK)
        head = await made.reader.readuntil(b"\r\n\r\n")
        assert b"\r\ndate: " in head
        assert b"connection: close" not in head
        await made.reader.readuntil(b"0\r\n\r\n")
        front.server.should_exit = True
        assert await made.reader.read() == b""


_hosts = itertools.count(1)


@contextmanager
def no_collector():
    """Disable garbage collection, so that only reference counts free objects."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def cold(scope, receive, send) -> None:
    """Answer by ASGI."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


async def hot(client) -> None:
    try:
        await client.body(1024, lambda size: None)
    except asyncio.CancelledError:  # the client disconnected
        return
    await client.respond(200, [(b"content-length", b"2")], b"hi")


cold.hot = {b"/hot": hot}


@pytest.mark.parametrize("path", [b"/hot", b"/cold"])
@pytest.mark.parametrize("leaves", ["at its end", "within a body"])
def test_client_connection_is_freed_without_garbage_collection(path, leaves):
    async def run() -> None:
        server = Server(cold, f"127.85.{os.getpid() % 250}.{next(_hosts)}", PORT, drain_seconds=1)
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        with no_collector():
            reader, writer = await asyncio.open_connection(server.config.host, PORT)
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
        server.should_exit = True
        await serving

    uvloop.run(run())


def test_engine_connection_is_freed_without_garbage_collection():
    async def run() -> None:
        async with JsonEngine() as engine:
            upstream = Upstream()
            with no_collector():
                reply = await upstream.request(engine.ip, HTTP_PORT, "POST", "/", {"authorization": "none"})
                while await reply.piece():
                    pass
                connection = weakref.ref(reply.connection)
                reply.close()
                del reply
                upstream.close()
                await until(lambda: connection() is None)

    uvloop.run(run())
