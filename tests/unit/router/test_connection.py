"""Client connections: forwarding of answers, large bodies, back pressure, freeing without the garbage collector."""

import asyncio
import contextlib
import itertools
import random
import sys

import httptools
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.router.rig import LoopbackServer, at_rest, unlimited
from unit.router.test_hostile_clients import connected
from unit.router.test_upstream import HEAD, Engine, chunk

from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.client_channel import AsgiClient
from mmrouter_router.http.engine_connection import HIGH_WATER, UpstreamError
from mmrouter_router.http.upstream import Upstream

ASK = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
PIECE = 64 * 1024
LIMIT = 600_000


class App:
    """An application with one hot path; other requests take the ASGI path and are answered with ``asgi <length>``."""

    def __init__(self, hot) -> None:
        self.hot = {b"/": hot}

    async def __call__(self, scope, receive, send) -> None:
        async with AsgiClient(scope, receive, send) as client:
            body = b"asgi %d" % len(await client.body(LIMIT, unlimited()))
            await client.respond(200, [(b"content-length", b"%d" % len(body))], body)


class Front(LoopbackServer):
    """A server that forwards an engine's answer as the router does."""

    def __init__(self, engine: Engine, *tls) -> None:
        super().__init__(App(self._direct), *tls)
        self.engine = engine
        self.upstream = Upstream(connect_seconds=10)
        self.failed: list[BaseException] = []
        self.bodies: list[bytes] = []
        self.held = unlimited()
        self.disconnects = 0

    async def _direct(self, client) -> None:
        self.held = unlimited()
        try:
            self.bodies.append(await client.body(LIMIT, self.held))
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


class Client:
    """Parses the answers of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.bodies: list[bytearray] = []
        self.ended = 0
        self.feed = httptools.HttpResponseParser(self).feed_data

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


@contextlib.asynccontextmanager
async def running_front(*tls):
    async with Engine() as engine, Front(engine, *tls) as made:
        yield made
    made.upstream.close()


@pytest_asyncio.fixture
async def front():
    async with running_front() as made:
        yield made


@contextlib.asynccontextmanager
async def client(front: Front, says: bytes = b""):
    async with connected(front) as (reader, writer):
        writer.write(says)
        yield Client(reader, writer)


def engine_answers(front: Front, pieces: list[bytes], *, chunked: bool = True, apart: float | None = None) -> None:
    @front.engine.answers
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

    @front.engine.answers
    async def answer(writer, head, body) -> None:
        writer.write(HEAD)
        for number in range(20):
            writer.write(chunk(b"<%d>" % number))
            await asyncio.wait_for(taken.get(), 5)  # set by the client
        writer.write(b"0\r\n\r\n")

    async with client(front, ASK) as made:
        for number in range(20):
            await made.reader.readuntil(b"<%d>" % number)
            taken.put_nowait(None)
        await made.reader.readuntil(b"0\r\n\r\n")


async def test_sequential_and_pipelined_requests_share_one_connection(front):
    engine_answers(front, [b"one", b"two"], apart=0.001)
    async with client(front, ASK) as made:
        assert await made.read(1) == [b"onetwo"]
        made.writer.write(ASK)
        assert await made.read(2) == [b"onetwo"] * 2
        assert front.engine.connections == 1  # the answer was read to its end
        made.writer.write(ASK + ASK)
        assert await made.read(4) == [b"onetwo"] * 3 + [b"asgi 0"]  # the pipelined one takes the ASGI path


async def test_slow_client_buffers_a_bounded_amount_and_gets_everything(front):
    sent = 0

    @front.engine.answers
    async def answer(writer, head, body) -> None:
        nonlocal sent
        writer.write(HEAD)
        for _ in range(800):
            writer.write(chunk(bytes(PIECE)))
            await writer.drain()
            sent += PIECE
        writer.write(b"0\r\n\r\n")

    async with client(front, ASK) as made:
        await at_rest(lambda: sent > HIGH_WATER and sent)
        # The kernel's buffers of two connections, and little more of the router's.
        assert HIGH_WATER < sent < 400 * PIECE
        assert sum(map(len, await made.read(1))) == 800 * PIECE


async def test_client_disconnect_aborts_the_engines_request(front):
    await assert_aborted(front, half=False)


async def test_client_that_closes_its_sending_side_counts_as_disconnected(front):
    await assert_aborted(front, half=True)


async def assert_aborted(front, *, half: bool) -> None:
    @front.engine.answers
    async def answer(writer, head, body) -> None:
        writer.write(HEAD)
        while not writer.is_closing():
            writer.write(chunk(b"more"))
            await writer.drain()
            await asyncio.sleep(0.005)
        raise ConnectionError

    async with client(front, ASK) as made:
        await made.reader.readuntil(b"more")
        if half:
            made.writer.write_eof()
            await asyncio.wait_for(front.engine.closed.wait(), 60)
    await asyncio.wait_for(front.engine.closed.wait(), 60)
    assert front.disconnects == 1


async def test_truncated_engine_answer_is_truncated_for_the_client(front):
    taken = asyncio.Event()

    @front.engine.answers
    async def answer(writer, head, body) -> None:
        writer.write(HEAD + chunk(b"a part"))
        await taken.wait()
        writer.transport.abort()
        raise ConnectionError

    async with client(front, ASK) as made:
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
                assert front.held.size == len(body)
        return front.bodies

    assert asyncio.run(received()) == [body for body, _, _ in cases]


@pytest.mark.parametrize("sent_first", [0, 1, 300_000, 2_000_000])
async def test_large_body_bypasses_the_parser_and_the_next_request_does_not(front, monkeypatch, sent_first):
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 4_000_000)
    engine_answers(front, [b"ok"])
    body = random.Random(1).randbytes(3_000_000)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with client(front, head + body[:sent_first]) as made:
        await made.writer.drain()
        await asyncio.sleep(0.01)
        made.writer.write(body[sent_first:] + ASK)  # the next request follows the last byte directly
        assert await made.read(2) in ([b"ok", b"ok"], [b"ok", b"asgi 0"])
        made.writer.write(head + body)
        assert (await made.read(3))[2] == b"ok"
    assert [bytes(one) for one in front.bodies if one] == [body, body]


@pytest.mark.parametrize("announced", [True, False])
async def test_oversized_body_is_refused_and_the_connection_stays_usable(front, announced):
    engine_answers(front, [b"ok"])
    size = LIMIT + 1
    how = b"content-length: %d" % size if announced else b"transfer-encoding: chunked"
    async with client(front, b"POST / HTTP/1.1\r\nhost: x\r\n" + how + b"\r\n\r\n") as made:
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


@pytest.mark.parametrize("line", [b"POST /?a=b", b"PUT /", b"POST /other"])
async def test_unusual_requests_take_the_asgi_path(front, line):
    engine_answers(front, [b"ok"])
    unusual = line + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"
    async with client(front, unusual) as made:
        assert await made.read(1) == [b"asgi 3"]
    async with client(front) as made:
        made.writer.write(ASK + unusual)  # pipelined
        assert await made.read(2) == [b"ok", b"asgi 3"]


async def test_http_1_0_client_gets_an_unchunked_answer_ended_by_close(front):
    for chunked, apart in itertools.product((True, False), (None, 0.001)):
        engine_answers(front, [b"one", b"two"], chunked=chunked, apart=apart)
        async with client(front, b"POST / HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 3\r\n\r\nabc") as made:
            head, _, body = (await made.reader.read()).partition(b"\r\n\r\n")
            assert (body, b"chunked" in head, b"connection: close" in head) == (b"onetwo", False, True)


async def test_expect_100_continue_is_answered(front):
    head = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"
    async with client(front, head) as made:
        assert (await made.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        made.writer.write(b"abc")
        assert await made.read(1) == [b"asgi 3"]


async def test_failing_handler_is_a_500_and_missing_answer_closes_the_connection(front):
    async def fails(client) -> None:
        raise ZeroDivisionError

    async def forgets(client) -> None:
        await client.body(LIMIT, unlimited())

    for handler, answers in ((fails, [b"Internal Server Error"]), (forgets, [])):
        front.server.config.app.hot = {b"/": handler}
        async with client(front, ASK) as made:
            assert await made.read(1) == answers
            assert await made.reader.read() == b""


async def test_header_with_line_break_is_never_sent(front):
    async def breaks(client) -> None:
        await client.respond(200, [(b"content-length", b"0"), (b"x", b"a\r\nset-cookie: b")], b"")

    front.server.config.app.hot = {b"/": breaks}
    async with client(front, ASK) as made:
        head = await made.reader.read()
    assert b"set-cookie" not in head


async def test_default_headers_are_sent_and_server_exit_closes_the_connection(front):
    engine_answers(front, [b"ok"])
    async with client(front, ASK) as made:
        head = await made.reader.readuntil(b"\r\n\r\n")
        assert b"\r\ndate: " in head
        assert b"connection: close" not in head
        await made.reader.readuntil(b"0\r\n\r\n")
        front.server.should_exit = True
        assert await made.reader.read() == b""
