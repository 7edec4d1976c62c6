"""An answer that is poured from an engine's connection into a client's: the bytes, and who waits for whom."""

import asyncio
import contextlib
import os

import httptools
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.router.test_upstream import HEAD, Engine, chunk

from mmrouter_router.serving import Server
from mmrouter_router.tap import tap_of
from mmrouter_router.upstream import HIGH_WATER, Upstream, UpstreamError

PORT = 8000
ASK = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
PIECE = 64 * 1024


class Front:
    """A server that passes an engine's answer on as the router does: head and end by ASGI, the rest poured."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ip = f"127.83.{os.getpid() % 250}.1"
        self.upstream = Upstream(connect_seconds=1)
        self.failed: list[BaseException] = []
        self.server = Server(self._app, self.ip, PORT, drain_seconds=1)
        self._task: asyncio.Task[None] | None = None

    async def _app(self, scope, receive, send) -> None:
        answer = await self.upstream.request("127.0.0.1", self.engine.port, "POST", "/", {})
        gone, work = asyncio.ensure_future(self._gone(receive)), asyncio.ensure_future(self._pass(scope, send, answer))
        try:
            await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        except UpstreamError as error:
            self.failed.append(error)
        finally:
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)
            answer.close()

    async def _gone(self, receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _pass(self, scope, send, answer) -> None:
        headers = [(name, value) for name, value in answer.headers if name != b"transfer-encoding"]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": await answer.piece(), "more_body": True})
        tap = tap_of(scope)
        assert tap is not None
        await answer.pour(tap)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def __aenter__(self) -> "Front":
        self._task = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.002)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.should_exit = True
        assert self._task is not None
        await self._task
        self.upstream.close()


class Client:
    """Reads answers of one connection with a parser of its own."""

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
            self._parser.feed_data(data)
        return self.bodies


@pytest_asyncio.fixture
async def front():
    engine = Engine()
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    engine.port = server.sockets[0].getsockname()[1]
    async with Front(engine) as made:
        yield made
    server.close()


@contextlib.asynccontextmanager
async def client(front: Front):
    reader, writer = await asyncio.open_connection(front.ip, PORT)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def says(front: Front, pieces: list[bytes], *, chunked: bool = True, apart: float | None = None) -> None:
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
def test_a_client_gets_the_engines_bytes_in_whatever_pieces_they_come(chunked, pieces):
    async def whole() -> list[bytearray]:
        engine = Engine()
        server = await asyncio.start_server(engine, "127.0.0.1", 0)
        engine.port = server.sockets[0].getsockname()[1]
        async with Front(engine) as front, client(front) as made:
            says(front, pieces, chunked=chunked, apart=0)
            made.writer.write(ASK)
            bodies = await made.read(1)
            assert made.ended == 1
        server.close()
        return bodies

    assert asyncio.run(whole()) == [b"".join(pieces)]


async def test_each_piece_is_with_the_client_before_the_next_one_is_sent(front):
    taken: asyncio.Queue[None] = asyncio.Queue()

    async def answer(writer, head, body) -> None:
        writer.write(HEAD)
        for number in range(20):
            writer.write(chunk(b"<%d>" % number))
            await asyncio.wait_for(taken.get(), 5)  # the client says when it has it
        writer.write(b"0\r\n\r\n")

    front.engine.answer = answer
    async with client(front) as made:
        made.writer.write(ASK)
        for number in range(20):
            await made.reader.readuntil(b"<%d>" % number)
            taken.put_nowait(None)
        await made.reader.readuntil(b"0\r\n\r\n")


async def test_answers_follow_each_other_on_one_connection_and_so_do_requests_that_do_not_wait(front):
    says(front, [b"one", b"two"], apart=0.001)
    async with client(front) as made:
        made.writer.write(ASK)
        assert await made.read(1) == [b"onetwo"]
        made.writer.write(ASK)
        assert await made.read(2) == [b"onetwo"] * 2
        assert front.engine.connections == 1  # it was read to its end
        made.writer.write(ASK + ASK)
        assert await made.read(4) == [b"onetwo"] * 4


async def test_a_client_that_does_not_read_holds_a_bounded_amount_and_gets_all_in_the_end(front):
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
        before = -1
        while sent != before:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.1)
        # What the kernel's buffers of two connections take, and little more of ours.
        assert HIGH_WATER < sent < 400 * PIECE
        assert sum(map(len, await made.read(1))) == 800 * PIECE


async def test_a_client_that_leaves_ends_the_engines_request(front):
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


async def test_an_answer_that_breaks_off_is_cut_for_the_client_too(front):
    async def answer(writer, head, body) -> None:
        writer.write(HEAD + chunk(b"a part"))
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.transport.abort()
        raise ConnectionError

    front.engine.answer = answer
    async with client(front) as made:
        made.writer.write(ASK)
        assert await made.read(1) == [b"a part"]
        assert made.ended == 0
    assert [str(error) for error in front.failed] == ["the engine broke off its answer"]
