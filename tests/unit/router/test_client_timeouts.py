"""Clients that stall or leave on real sockets: timeouts, and the end of a connection."""

import asyncio
import contextlib
import itertools
import re
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.rig import PORT, at_rest, unlimited
from unit.router.test_hostile_clients import END, FRAMED, LIMIT, LINES, POST, Front, answer_to, connected, request
from waiting import until

from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.body_budget import BodyBudget, BodyReservation
from mmrouter_router.http.client_channel import CLIENT_TIMEOUTS, MAX_STEP_SECONDS, ProcessClock, unread_bytes

LATER = 1e6
BOTH_PATHS = pytest.mark.parametrize("hot", [True, False])


async def end_of(reader) -> bytes:
    return await asyncio.wait_for(reader.read(), 5)


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
        assert await end_of(reader) == b""


BODIES = [
    b"content-length: 100\r\n\r\n12345",
    b"content-length: 80000\r\n\r\n12345",
    b"transfer-encoding: chunked\r\n\r\n5\r\n12345\r\n",
]


@BOTH_PATHS
@pytest.mark.parametrize("body", BODIES)
async def test_stalled_body_times_out_with_408(hot, body):
    async with Front(hot=hot) as front, connected(front) as (reader, writer):
        writer.write(POST + body)
        # An ASGI request always waits for its body; the task of a hot request may not have started yet.
        await until(lambda: front.received() == 5 and getattr(front.connection().cycle, "waiting", front.reading))
        front.look(LATER)
        front.look(LATER + CLIENT_TIMEOUTS.body_stall_seconds)
        assert len(front.server.server_state.connections) == 1
        front.look(LATER + CLIENT_TIMEOUTS.body_stall_seconds + 1)
        answer = await end_of(reader)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer


@BOTH_PATHS
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
        assert await end_of(reader) == b""


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


@pytest.mark.parametrize("begin", [POST + b"connection: close\r\n", POST.replace(b"1.1", b"1.0")])
@pytest.mark.parametrize("refused", [b"authorization: no\r\ncontent-length: 300000", b"content-length: 4000000"])
async def test_sending_client_gets_the_answer_that_closes_its_connection(begin, refused):
    body = bytes(int(refused.split()[-1]))
    async with Front() as front:
        for _ in range(3):
            answer = await answer_to(front, begin + refused + b"\r\n\r\n" + body)
            assert re.match(rb"HTTP/1.1 (401|413) ", answer)
            assert answer.endswith(b"}}")


@BOTH_PATHS
async def test_invalid_input_is_refused_after_the_pending_answer(hot):
    async def streams(client) -> None:
        await client.body(LIMIT, unlimited())
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
        front.serve(streams)
        async with connected(front) as (reader, writer):
            writer.write(request(LINES[0], [], FRAMED[0]))
            await reader.readuntil(b"one\r\n")
            writer.write(b"no request\r\n\r\n")
            await until(lambda: front.connection().input_ended)
            front.go.set()
            assert (await end_of(reader)).startswith(b"0\r\n\r\nHTTP/1.1 400 ")


@BOTH_PATHS
@pytest.mark.parametrize("length", [10, LIMIT])
async def test_a_body_that_gives_way_is_answered_while_it_stalls(hot: bool, length: int) -> None:
    async with Front(hot=hot) as front, connected(front) as (reader, writer):
        budget, clients = BodyBudget(10), []

        async def answer(client) -> None:
            clients.append(client)
            held = BodyReservation(budget, client.refuse_body)
            try:
                await client.body(LIMIT, held)
            except RequestError as error:
                body = error.to_body()
                await client.respond(error.status, [(b"content-length", b"%d" % len(body))], body)

        front.serve(answer)
        writer.write(POST + b"content-length: %d\r\n\r\n" % length + b"z" * 5)
        await until(lambda: clients and getattr(clients[0], "waiting", True))
        clients[0].refuse_body(RequestError.router_full(1))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 429 ")


async def test_exit_answers_pending_requests_and_reads_pending_bodies():
    async with Front() as front, contextlib.AsyncExitStack() as stack:
        waits, sends, idle = [await stack.enter_async_context(connected(front)) for _ in range(3)]
        waits[1].write(request(LINES[0], [b"x-wait: yes"], FRAMED[0]))
        sends[1].write(POST + b"content-length: %d\r\n\r\n" % LIMIT + b"z" * 10)
        await until(lambda: front.seen and front.reading == 2)
        await front.connected(3)
        front.server.should_exit = True
        assert await end_of(idle[0]) == b""
        sends[1].write(b"z" * (LIMIT - 10))
        front.go.set()
        for reader, _ in (waits, sends):
            answer = await end_of(reader)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in answer
    assert [len(body) for body in front.seen] == [3, LIMIT]


async def test_reset_within_a_body_leaves_no_task_or_connection():
    async with Front() as front:
        for body in BODIES:
            front.reading, front.disconnected = 0, asyncio.Event()
            async with connected(front) as (_, writer):
                writer.write(POST + body)
                await until(lambda: front.reading)
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            await asyncio.wait_for(front.disconnected.wait(), 5)
            await front.connected(0)
            assert not front.server.server_state.tasks


@BOTH_PATHS
async def test_a_disconnect_ends_a_request_that_others_are_pipelined_behind(hot: bool) -> None:
    async with Front(hot=hot) as front:
        async with connected(front) as (_, writer):
            writer.write(request(LINES[0], [b"x-wait: yes"], FRAMED[0]) + END + END)
            await until(lambda: front.seen)
        await front.connected(0)
        front.go.set()
        await asyncio.wait_for(front.disconnected.wait(), 60)
        await until(lambda: not front.server.server_state.tasks)


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

    async def answer(self, client) -> None:
        """Answer a request with this stream; a client that is disconnected ends it."""
        try:
            await client.body(LIMIT, unlimited())
            await client.stream(200, [], b"one", self)
        except asyncio.CancelledError:
            self.cut.set()


@contextlib.contextmanager
def small_window(front) -> Iterator[socket.socket]:
    """A connected socket whose kernel holds little, so that the server sees each read."""
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        made.connect((front.ip, PORT))
        yield made


@BOTH_PATHS
async def test_client_that_reads_below_the_minimum_rate_is_aborted(hot):
    endless = Endless()

    async with Front(hot=hot) as front:
        front.serve(endless.answer)
        with small_window(front) as made:
            made.sendall(request(LINES[0], [], FRAMED[0]))
            await front.connected(1)
            connection = front.connection()
            await at_rest(lambda: connection.flow.write_paused and unread_bytes(connection.transport))
            now = LATER
            for _ in range(8):  # 40 KiB a minute
                before, left = unread_bytes(connection.transport), 40 * 1024
                while left:
                    left -= len(made.recv(min(left, 4096)))
                    await asyncio.sleep(0.001)
                await until(lambda before=before: unread_bytes(connection.transport) != before)
                for _ in range(59):
                    now += 1
                    if not connection.transport.is_closing():
                        front.look(now)
                if connection.transport.is_closing():
                    break
            await front.connected(0)


async def test_rest_of_an_answer_that_is_not_read_does_not_keep_its_connection():
    async def answers(client) -> None:
        await client.body(LIMIT, unlimited())
        made = front.connection().transport.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = bytes(48 * 1024)  # too little to pause for, too much for the kernel
        await client.respond(200, [(b"content-length", b"%d" % len(body))], body)

    async with Front() as front:
        front.serve(answers)
        with small_window(front) as made:
            made.sendall(request(LINES[0], [b"connection: close"], FRAMED[0]))
            await front.connected(1)
            connection = front.connection()
            await until(connection.transport.is_closing)
            assert connection.transport.get_write_buffer_size()
            assert not connection.flow.write_paused
            await at_rest(lambda: unread_bytes(connection.transport))
            front.look(LATER)
            await front.connected(1)
            front.look(LATER + CLIENT_TIMEOUTS.answer_stall_seconds + 1)
            await front.connected(0)


@BOTH_PATHS
async def test_client_that_reads_nothing_is_aborted_and_slow_reader_is_not(hot):
    endless = Endless()

    async with Front(hot=hot) as front:
        front.serve(endless.answer)
        with socket.create_connection((front.ip, PORT)) as made:
            made.sendall(request(LINES[0], [], FRAMED[0]))
            await front.connected(1)
            connection = front.connection()
            now = LATER
            await at_rest(lambda: connection.flow.write_paused and unread_bytes(connection.transport))
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
