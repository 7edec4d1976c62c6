"""Slow, unusual and hostile clients on real sockets: their answers, and their cost in time and memory."""

import asyncio
import contextlib
import itertools
import json
import re

import pytest
import uvloop
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from unit.router.rig import LoopbackServer, unlimited
from waiting import until

from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.client_channel import CLIENT_TIMEOUTS, AsgiClient, ClientGoneError
from mmrouter_router.http.connection import HEAD_LIMIT, ClientConnection

pytestmark = pytest.mark.usefixtures("same_request_id")
LIMIT = 80_000
EXAMPLES = 25
END = b"POST /other HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"


class Front(LoopbackServer):
    """A server that echoes what it parsed. ``hot``: whether ``/`` is served without ASGI."""

    def __init__(self, *, hot: bool = True) -> None:
        super().__init__(self._app(hot))
        self.seen: list[bytes] = []
        self.disconnected = asyncio.Event()
        self.reading = 0  # requests whose body is being read
        self.go = asyncio.Event()

    def _app(self, hot: bool):
        async def app(scope, receive, send) -> None:
            async with AsgiClient(scope, receive, send) as client:
                await self.answer(client)

        app.hot = {b"/": self.answer} if hot else {}
        return app

    def serve(self, answer) -> None:
        """Answer by this function, on the path that the server has."""
        self.answer = answer
        if hot := self.server.config.app.hot:
            hot[b"/"] = answer

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
        self.reading += 1
        body = await client.body(LIMIT, unlimited(client.refuse_body))
        self.seen.append(bytes(body))
        if (b"x-wait", b"yes") in client.headers:
            await self.go.wait()
        names = [(name.decode(), value.decode("latin-1")) for name, value in client.headers]
        return json.dumps([client.method, client.path, names, len(body), body[:20].hex()]).encode() + b"\n"

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


@contextlib.asynccontextmanager
async def connected(front: Front):
    reader, writer = await front.connect()
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
    *(b"POST " + target + b" HTTP/1.1" for target in b"/ /?a=b http://x/ //x /%2e /\xff *".split()),
    *(method + b" HTTP/1.1" for method in (b"CONNECT x:80", b"OPTIONS /", b"HEAD /", b"FOO /", b"\r\n\r\nPOST /")),
    *(b"POST / HTTP/1.0", b"POST / HTTP/2.0", b"POST /"),
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
    assert b"x-late" not in answer  # a trailer is no header of the request


@pytest.mark.parametrize("header", HEADERS)
def test_every_header_is_answered_as_by_asgi(pair, header):
    closes = header == b"connection: close"  # what is sent after it may be answered with a reset
    framings, fragmented = ((0, 6), ([30, 31],)) if closes else ((0, 3, 6), ([], [30, 31], [60, 150]))
    for number, cuts in itertools.product(framings, fragmented):
        answer = pair.same(request(LINES[0], [header], FRAMED[number]), cuts)
        assert re.search(rb"HTTP/1.1 (200|401) ", answer)
        assert (b'"/other"' in answer) != closes


@given(st.lists(requests(), min_size=1, max_size=3), st.lists(st.integers(1, 700), max_size=3))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([request(LINES[0], [HEADERS[6]], FRAMED[0])] * 3, [])
def test_pipelined_requests_are_answered_as_by_asgi_for_any_fragmentation(pair, raws, cuts):
    pair.same(b"".join(raws), cuts)


# -- endless input -----------------------------------------------------------------------------------------------------


NO_HEADS = {
    "no host": (b"POST / HTTP/1.1\r\n", 400),
    "two hosts": (b"POST / HTTP/1.1\r\nhost: x\r\nhost: x\r\n", 400),
    "two hosts of HTTP/1.0": (b"POST / HTTP/1.0\r\nhost: x\r\nhost: y\r\n", 400),
    "another version": (b"POST / HTTP/2.0\r\nhost: x\r\n", 400),
    "connect": (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n", 405),
    "connect to a path": (b"CONNECT / HTTP/1.1\r\nhost: x\r\n", 405),
    "a length of 5,000 digits": (POST + b"content-length: " + b"9" * 5000 + b"\r\n", 400),
    "a length of 19 digits": (POST + b"content-length: " + b"9" * 19 + b"\r\n", 413),
}


@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize(("head", "status"), NO_HEADS.values(), ids=list(NO_HEADS))
async def test_a_head_that_is_not_served_is_answered_once(hot: bool, head: bytes, status: int) -> None:
    length = b"" if b"content-length" in head else b"content-length: 3\r\n"
    async with Front(hot=hot) as front, connected(front) as (reader, writer):
        writer.write(head + length + b"\r\nabc" + POST + b"content-length: 0\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 %d " % status)
        if status != 413:
            assert (await asyncio.wait_for(reader.read(), 5)).count(b"HTTP/1.1 4") == 0
        assert front.seen == []


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
