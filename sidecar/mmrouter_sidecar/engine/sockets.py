"""ZMQ sockets towards the engine: receive events, request replays, and detect the end of the engine.

Each data parallel rank has a bound SUB socket with a monitor, and a DEALER socket per replay. The engine's publisher
connects to the sidecar (docs/engine-facts/vllm.md#event-sockets), so the end of its connection is the end of the
engine, which the frames do not show. The decisions are made in :mod:`mmrouter_sidecar.engine.event_order` and
:mod:`mmrouter_sidecar.feed.relay`.
"""

import asyncio
import errno
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from mmrouter_sidecar.engine.event_order import Duplicate, EventStream, Lost, NextBatch, ReplayRequest, Skipped, Step
from mmrouter_sidecar.feed.relay import DISCONNECTED, EventRelay
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Settings

log = logging.getLogger("mmrouter.sidecar")

END = b"\xff" * 8
DRAIN = 256  # messages received in a row before other tasks run
GATHER_SECONDS = 0.002
"""Pause after each portion, so that a busy engine's next one has several messages: a wake-up costs as much as the work
on a dozen blocks."""
RECEIVE_HWM = 100_000
REPLAY_SECONDS = 3.0  # longest silence of a replay: engines serve it between publishes, within 0.1 s when idle
QUIET_SECONDS = 1.0  # silence after which a replay is requested once: a full queue drops the newest messages
TAIL_SECONDS = 10.0  # seconds between further such replays while the silence lasts
RESUME_SECONDS = 10.0  # longest wait for the replay that confirms the journal; engines answer within a second
BIND_SECONDS = 0.02
WATCHED = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.DISCONNECTED
)


class RankSockets:
    """The sockets and the stream of one rank of ``engine``."""

    def __init__(self, rank: int, engine: "EngineSockets") -> None:
        self._rank, self._relay, self._context, self._metrics = rank, engine.relay, engine.context, engine.metrics
        self._flush_soon, self._replaced = engine.flush_soon, engine.replaced
        host, ports = engine.settings.loopback, engine.settings.ports
        self._events, self._replays = (f"tcp://{host}:{port + rank}" for port in (ports.events, ports.replay))
        self.stream = EventStream(self._relay.proofs.get(rank))
        self._replay: asyncio.Task[None] | None = None
        self._connected = False
        self._received = self._checked = 0.0
        self._resumed = asyncio.get_running_loop().time() if self.stream.resumed else None
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bound = asyncio.Event()

    async def run(self) -> None:
        """Serve one connection of the engine after the other until cancelled."""
        try:
            while True:
                sub, monitor = await self._bind()
                self.bound.set()
                try:
                    await self._serve(sub, monitor)
                finally:
                    # A new socket for the next engine, so that queued messages of the old one cannot reach its stream.
                    _close(sub, monitor)
                self._ended()
        finally:
            self._cancel_replay()

    def restart(self) -> None:
        """Reset the stream: another rank found that the engine was replaced."""
        self.stream.ended()
        self._cancel_replay()
        if self._connected:
            self._process(self.stream.connected())

    async def _bind(self) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        waiting = False
        while True:
            sub: zmq.asyncio.Socket = self._context.socket(zmq.SUB)
            sub.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
            sub.setsockopt(zmq.LINGER, 0)
            sub.subscribe(b"")
            # Monitor before binding, because a waiting engine connects at once.
            monitor: zmq.asyncio.Socket = sub.get_monitor_socket(WATCHED)
            try:
                sub.bind(self._events)
            except zmq.ZMQError as error:
                _close(sub, monitor)
                if error.errno != errno.EADDRINUSE:
                    raise
                if not waiting:
                    log.info("rank %d: waiting until %s is free", self._rank, self._events)
                waiting = True
                await asyncio.sleep(BIND_SECONDS)  # libzmq closes the old socket asynchronously
                continue
            return sub, monitor

    async def _serve(self, sub: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        receiving = asyncio.create_task(self._receive(sub))
        checking = asyncio.create_task(self._check_tail())
        watching = asyncio.create_task(self._watch(monitor))
        self._broken = asyncio.get_running_loop().create_future()
        tasks = (receiving, checking, watching, self._broken)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, sub: zmq.asyncio.Socket) -> None:
        direct: zmq.Socket[bytes] = zmq.Socket.shadow(sub)
        loop = asyncio.get_running_loop()
        while True:
            self._receive_live(await sub.recv_multipart())
            self._received = loop.time()
            try:
                for _ in range(DRAIN):
                    self._receive_live(direct.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                pass
            self._flush_soon()
            await asyncio.sleep(GATHER_SECONDS)

    def _receive_live(self, parts: list[bytes]) -> None:
        if len(parts) != 3 or len(parts[1]) != 8:
            self._metrics.frames.inc()
            return
        self._process(self.stream.live(int.from_bytes(parts[1], "big"), parts[2]))

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Return when the last connection of the engine has ended."""
        connections = strangers = 0
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                connections += 1
                self._connected = True
                self._received = asyncio.get_running_loop().time()
                self._metrics.connections.labels("connected").inc()
                log.info("rank %d: the engine's publisher connected", self._rank)
                self._relay.connected()
                self._process(self.stream.connected())
            elif event != zmq.Event.DISCONNECTED:
                strangers += 1  # not a publisher; its DISCONNECTED follows
            elif strangers:
                strangers -= 1
            else:
                connections -= 1
                if connections <= 0:
                    return

    async def _check_tail(self) -> None:
        """Request a replay after silence, because messages may be lost; end the wait for a confirmed journal."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(QUIET_SECONDS)
            now = loop.time()
            if self._resumed is not None and now - self._resumed >= RESUME_SECONDS:
                self._process(self.stream.expire())
            if not self._connected or now - self._received < QUIET_SECONDS:
                continue
            if self._checked < self._received or now - self._checked >= TAIL_SECONDS:
                self._checked = now
                self._process(self.stream.quiet())

    def _ended(self) -> None:
        self._connected = False
        self._cancel_replay()
        self.stream.ended()
        self._metrics.connections.labels(DISCONNECTED).inc()
        log.warning("rank %d: the engine's connection ended", self._rank)
        self._relay.engine_ended(DISCONNECTED)
        self._replaced(self)

    def _process(self, steps: list[Step]) -> None:
        for step in steps:
            match step:
                case NextBatch(seq, payload, digest):
                    self._relay.batch(self._rank, seq, payload, digest)
                case Duplicate():
                    self._metrics.duplicates.inc()
                case ReplayRequest(first):
                    self._request_replay(first)
                case Skipped(first, end):
                    log.warning("rank %d: the engine no longer has batches %d to %d", self._rank, first, end)
                    self._metrics.skipped.inc(end - first + 1)
                case Lost(reason):
                    if self._relay.lost(self._rank, reason):
                        self._replaced(self)
        if self._resumed is not None and not self.stream.resumed:
            self._resumed = None
            self._relay.confirm(self._rank)

    def _request_replay(self, first: int) -> None:
        self._cancel_replay()
        if self.stream.waiting:
            self._metrics.gaps.inc()
        self._replay = asyncio.create_task(self._fetch(first))
        self._replay.add_done_callback(self._fetched)

    def _fetched(self, task: asyncio.Task[None]) -> None:
        """Let an unexpected exception of a replay end ``run``."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _cancel_replay(self) -> None:
        task, self._replay = self._replay, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _fetch(self, first: int) -> None:
        """Run one replay over its own socket, so that a late answer is dropped with it."""
        this_task = asyncio.current_task()
        dealer: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, 0)  # the engine's ROUTER socket drops messages beyond the mark
            dealer.connect(self._replays)
            await dealer.send_multipart([b"", first.to_bytes(8, "big")])
            received = 0
            while self._replay is this_task:
                async with asyncio.timeout(REPLAY_SECONDS):
                    parts = await dealer.recv_multipart()
                received += 1
                if received % DRAIN == 0:
                    self._flush_soon()
                    await asyncio.sleep(0)
                if self._replay is not this_task:
                    return
                # Some releases omit the topic; the number and the payload are always the last two parts.
                if len(parts) < 3 or len(parts[-2]) != 8:
                    self._metrics.frames.inc()
                    continue
                if parts[-2] == END:
                    self._metrics.replays.labels("complete").inc()
                    self._process(self.stream.replay_ended())
                    return
                self._process(self.stream.replayed(int.from_bytes(parts[-2], "big"), parts[-1]))
        except TimeoutError:
            self._metrics.replays.labels("unanswered").inc()
            if self._replay is this_task:
                self._process(self.stream.replay_failed())
        finally:
            dealer.close(0)
            self._flush_soon()


def _close(socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
    socket.disable_monitor()
    monitor.close(0)
    socket.close(0)


class EngineSockets:
    """The sockets of all ranks of one engine. ``flush_soon`` is called after every portion of messages."""

    def __init__(
        self,
        settings: Settings,
        relay: EventRelay,
        context: zmq.asyncio.Context,
        metrics: Metrics,
        flush_soon: Callable[[], None],
    ) -> None:
        self.settings, self.relay, self.context, self.metrics = settings, relay, context, metrics
        self.flush_soon = flush_soon
        self._ranks = [RankSockets(rank, self) for rank in range(settings.ranks)]

    async def run(self) -> None:
        """Serve all ranks until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for rank in self._ranks:
                tasks.create_task(rank.run())

    async def bound(self) -> None:
        for rank in self._ranks:
            await rank.bound.wait()

    def replaced(self, by: RankSockets) -> None:
        for rank in self._ranks:
            if rank is not by:
                rank.restart()
