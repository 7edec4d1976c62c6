"""The sockets towards one engine: per data parallel rank a SUB that binds, a DEALER per replay, a monitor.

The engine's publisher connects to us (docs/engine-facts/vllm.md#event-sockets), so the end of its connection is the
end of the engine:
nothing in the frames would tell. What decides is in :mod:`mmrouter_sidecar.engine.event_order` and
:mod:`mmrouter_sidecar.feed.relay`;
here frames are received, replays are asked for, and time is kept.
"""

import asyncio
import errno
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from mmrouter_sidecar.engine.event_order import Ask, Duplicate, Lost, Ready, Skipped, Step, Stream
from mmrouter_sidecar.feed.relay import DISCONNECTED, Relay
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Settings

log = logging.getLogger("mmrouter.sidecar")

END = b"\xff" * 8
DRAIN = 256
"""Messages taken in one go before others get their turn."""
GATHER_SECONDS = 0.002
"""Pause after each portion, so that a busy engine's next one is more than one message: every wake-up costs as much as
the work on a dozen blocks."""
RECEIVE_HWM = 100_000
REPLAY_SECONDS = 3.0
"""How long a replay may be silent: engines serve it between publishes, within 0.1 s when idle."""
QUIET_SECONDS = 1.0
"""Silence after which the tail is looked for once: the newest messages are the ones that a full queue drops."""
TAIL_SECONDS = 10.0
"""And how often again while the silence lasts."""
BIND_SECONDS = 0.02
WATCHED = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.DISCONNECTED
)


class Rank:
    """One rank's sockets and stream. ``settle`` is called after every portion of messages."""

    def __init__(
        self,
        rank: int,
        settings: Settings,
        relay: Relay,
        context: zmq.asyncio.Context,
        metrics: Metrics,
        settle: Callable[[], None],
        replaced: Callable[["Rank"], None],
    ) -> None:
        self._rank, self._relay, self._context, self._metrics = rank, relay, context, metrics
        self._settle, self._replaced = settle, replaced
        self._events = f"tcp://{settings.loopback}:{settings.ports.events + rank}"
        self._replays = f"tcp://{settings.loopback}:{settings.ports.replay + rank}"
        self.stream = Stream(relay.proofs.get(rank))
        self._replay: asyncio.Task[None] | None = None
        self._connected = False
        self._heard = self._looked = 0.0
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bound = asyncio.Event()

    async def run(self) -> None:
        """Serve connection after connection of the engine; ends only by cancellation."""
        try:
            while True:
                sub, monitor = await self._bind()
                self.bound.set()
                try:
                    await self._serve(sub, monitor)
                finally:
                    # A new socket for the next engine: what the old one still had queued must not reach its stream.
                    _close(sub, monitor)
                self._ended()
        finally:
            self._cancel_replay()

    def restart(self) -> None:
        """Another rank found that the engine is another one: nothing of this stream is proved either."""
        self.stream.ended()
        self._cancel_replay()
        if self._connected:
            self._take(self.stream.connected())

    async def _bind(self) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        waiting = False
        while True:
            sub: zmq.asyncio.Socket = self._context.socket(zmq.SUB)
            sub.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
            sub.setsockopt(zmq.LINGER, 0)
            sub.subscribe(b"")
            # Watched before it listens: a waiting engine connects at once, and that must be seen.
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
                await asyncio.sleep(
                    BIND_SECONDS
                )  # a closed socket leaves its port a moment later, and nothing tells when
                continue
            return sub, monitor

    async def _serve(self, sub: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        """Receive until the engine's connection ends."""
        receiving = asyncio.create_task(self._receive(sub))
        looking = asyncio.create_task(self._look())
        watching = asyncio.create_task(self._watch(monitor))
        self._broken = asyncio.get_running_loop().create_future()
        tasks = (receiving, looking, watching, self._broken)
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
            self._live(await sub.recv_multipart())
            self._heard = loop.time()
            try:
                for _ in range(DRAIN):
                    self._live(direct.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                pass
            self._settle()
            await asyncio.sleep(GATHER_SECONDS)

    def _live(self, parts: list[bytes]) -> None:
        if len(parts) != 3 or len(parts[1]) != 8:
            self._metrics.frames.inc()
            return
        self._take(self.stream.live(int.from_bytes(parts[1], "big"), parts[2]))

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Return when the last of the engine's connections ended."""
        connections = strangers = 0
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                connections += 1
                self._connected = True
                self._heard = asyncio.get_running_loop().time()
                self._metrics.connections.labels("connected").inc()
                log.info("rank %d: the engine's publisher connected", self._rank)
                self._relay.connected()
                self._take(self.stream.connected())
            elif event != zmq.Event.DISCONNECTED:
                strangers += 1  # no publisher; its DISCONNECTED follows
            elif strangers:
                strangers -= 1
            else:
                connections -= 1
                if connections <= 0:
                    return

    async def _look(self) -> None:
        """Look for a lost tail when nothing comes."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(QUIET_SECONDS)
            now = loop.time()
            if not self._connected or now - self._heard < QUIET_SECONDS:
                continue
            if self._looked < self._heard or now - self._looked >= TAIL_SECONDS:
                self._looked = now
                self._take(self.stream.quiet())

    def _ended(self) -> None:
        self._connected = False
        self._cancel_replay()
        self.stream.ended()
        self._metrics.connections.labels(DISCONNECTED).inc()
        log.warning("rank %d: the engine's connection ended", self._rank)
        self._relay.engine_ended(DISCONNECTED)
        self._replaced(self)

    def _take(self, steps: list[Step]) -> None:
        for step in steps:
            match step:
                case Ready(seq, payload, digest):
                    self._relay.batch(self._rank, seq, payload, digest)
                case Duplicate():
                    self._metrics.duplicates.inc()
                case Ask(first):
                    self._ask(first)
                case Skipped(first, end):
                    log.warning("rank %d: the engine no longer has batches %d to %d", self._rank, first, end)
                    self._metrics.skipped.inc(end - first + 1)
                case Lost(reason):
                    if self._relay.lost(self._rank, reason):
                        self._replaced(self)

    def _ask(self, first: int) -> None:
        self._cancel_replay()
        if self.stream.waiting:
            self._metrics.gaps.inc()
        self._replay = asyncio.create_task(self._fetch(first))
        self._replay.add_done_callback(self._fetched)

    def _fetched(self, task: asyncio.Task[None]) -> None:
        """A fault in a replay is a fault of the rank: it ends ``run`` instead of passing unseen."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _cancel_replay(self) -> None:
        task, self._replay = self._replay, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _fetch(self, first: int) -> None:
        """One replay, over a socket of its own, so that an answer that comes too late meets nobody."""
        me = asyncio.current_task()
        dealer: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, 0)  # the engine's ROUTER drops what does not fit
            dealer.connect(self._replays)
            await dealer.send_multipart([b"", first.to_bytes(8, "big")])
            received = 0
            while self._replay is me:
                async with asyncio.timeout(REPLAY_SECONDS):
                    parts = await dealer.recv_multipart()
                received += 1
                if received % DRAIN == 0:
                    self._settle()
                    await asyncio.sleep(0)
                if self._replay is not me:
                    return
                # Some releases leave the topic out: the number and the payload are always the last two.
                if len(parts) < 3 or len(parts[-2]) != 8:
                    self._metrics.frames.inc()
                    continue
                if parts[-2] == END:
                    self._metrics.replays.labels("complete").inc()
                    self._take(self.stream.replay_ended())
                    return
                self._take(self.stream.replayed(int.from_bytes(parts[-2], "big"), parts[-1]))
        except TimeoutError:
            self._metrics.replays.labels("unanswered").inc()
            if self._replay is me:
                self._take(self.stream.replay_failed())
        finally:
            dealer.close(0)
            self._settle()


def _close(socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
    socket.disable_monitor()
    monitor.close(0)
    socket.close(0)


class Engine:
    """All ranks of one engine."""

    def __init__(
        self,
        settings: Settings,
        relay: Relay,
        context: zmq.asyncio.Context,
        metrics: Metrics,
        settle: Callable[[], None],
    ) -> None:
        self._ranks = [
            Rank(rank, settings, relay, context, metrics, settle, self._replaced) for rank in range(settings.ranks)
        ]

    async def run(self) -> None:
        """Serve all ranks; ends only by cancellation."""
        async with asyncio.TaskGroup() as tasks:
            for rank in self._ranks:
                tasks.create_task(rank.run())

    async def bound(self) -> None:
        """Wait until every rank's event socket listens."""
        for rank in self._ranks:
            await rank.bound.wait()

    def _replaced(self, by: Rank) -> None:
        for rank in self._ranks:
            if rank is not by:
                rank.restart()
