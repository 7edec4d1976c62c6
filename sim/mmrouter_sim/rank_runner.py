"""Run the scheduler of one data-parallel rank and publish its KV events as vLLM does, on a PUB and a replay socket.

Frames are ``[topic][sequence, 8 bytes big-endian][payload]`` (docs/engine-facts/vllm.md#kv-event-flags). The PUB socket
binds wildcard and in-process addresses and *connects* to any other; the replay socket always binds; the rank is added
to tcp ports. A new process restarts at sequence 0 without notice.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal

import msgspec
import zmq

from mmrouter_sim.core.events import Event, encode_events
from mmrouter_sim.core.requests import Request
from mmrouter_sim.core.scheduler import Output, Scheduler

log = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class EventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``--kv-events-config``, with the engine's defaults."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches that can be replayed
    hwm: int = 100_000  # queued messages for a slow or absent subscriber
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Whether the engine's PUB socket binds the endpoint; it connects to any other."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith(("ipc://", "inproc://"))

    def of_rank(self, rank: int) -> "EventsConfig":
        """Return the configuration of one rank, with its own ports. Raises ``ValueError``."""
        return msgspec.structs.replace(
            self,
            endpoint=offset_port(self.endpoint, rank),
            replay_endpoint=offset_port(self.replay_endpoint, rank) if self.replay_endpoint else None,
        )


def offset_port(endpoint: str, rank: int) -> str:
    """Return a rank's own endpoint: tcp port + rank (0 stays 0), a suffix for inproc. Raises ``ValueError`` else."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    host, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not colon or not port.isdecimal():
        raise ValueError(f"endpoint {endpoint!r} has no port to which data-parallel ranks could be added")
    return f"{host}:{int(port) + rank if int(port) else 0}"


class Publisher:
    """The sockets of one rank. ``clock`` gives the seconds since 1970 that go into each batch."""

    def __init__(self, config: EventsConfig, rank: int, clock: Callable[[], float] = time.time) -> None:
        self.config = config.of_rank(rank)
        self._rank = rank
        self._clock = clock
        self._topic = self.config.topic.encode()
        self._sequence = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=self.config.buffer_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router: zmq.Socket[bytes] | None = None

    def start(self) -> None:
        """Open the sockets; needs a running loop. Raises ``zmq.ZMQError`` for an invalid address or one in use."""
        self._pub.set_hwm(self.config.hwm)
        if self.config.binds:
            self._pub.bind(self.config.endpoint)
        else:
            self._pub.connect(self.config.endpoint)
        if self.config.endpoint.endswith(":0"):
            bound = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
            self.config = msgspec.structs.replace(self.config, endpoint=bound)
        if self.config.replay_endpoint is not None:
            # The high-water mark is ZMQ's default of 1000, as in the engine: a reader that stalls in a long replay
            # loses the rest of it, including the end mark.
            self._router = self._context.socket(zmq.ROUTER)
            self._router.bind(self.config.replay_endpoint)
            asyncio.get_running_loop().add_reader(self._router.fileno(), self._serve, self._router)

    def publish(self, events: Sequence[Event]) -> None:
        """Publish the events of one step. Never blocks: a slow subscriber loses messages."""
        payload = encode_events(self._clock(), events, self._rank)
        self._sent.append((self._sequence, payload))
        self._pub.send_multipart([self._topic, self._sequence.to_bytes(8, "big"), payload])
        self._sequence += 1

    def close(self) -> None:
        """Close the sockets and drop what has not been sent."""
        if self._router is not None:
            asyncio.get_running_loop().remove_reader(self._router.fileno())
            self._router.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()

    def _serve(self, router: "zmq.Socket[bytes]") -> None:
        # The descriptor becomes readable once per change, so read all messages before the next wait.
        while router.poll(0):
            frames = router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                log.warning("invalid replay request of %d frames dropped", len(frames))
                continue
            start = int.from_bytes(frames[2], "big")
            for sequence, payload in self._sent:
                if sequence >= start:
                    router.send_multipart([frames[0], b"", self._topic, sequence.to_bytes(8, "big"), payload])
            router.send_multipart([frames[0], b"", b"", END_OF_REPLAY, b""])


class Aborted(Exception):  # noqa: N818 - an outcome, not an error
    """The engine aborted this request at shutdown."""


class Runner:
    """Drives one scheduler, as the engine's core process does. ``publisher`` is ``None`` where KV events are off.
    Durations of steps count from the planned end of the last one, so late wake-ups do not add up. ``tells_when_idle``:
    what happened beside a step goes out when there is no next one, not with the next one.
    """

    def __init__(self, scheduler: Scheduler, publisher: Publisher | None, *, tells_when_idle: bool = False) -> None:
        self.scheduler = scheduler
        self.publisher = publisher
        self.tells_when_idle = tells_when_idle
        self._queues: dict[Request, asyncio.Queue[Output | None]] = {}
        self._wake = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def load(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.running)

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Run a request and yield its tokens. Leaving the iteration early aborts it. Raises ``ValueError`` for a
        request that can never run here and :class:`Aborted` when the engine shuts down.
        """
        queue: asyncio.Queue[Output | None] = asyncio.Queue()
        self.scheduler.add(request)
        self._queues[request] = queue
        self._quiet.clear()
        self._wake.set()
        try:
            while True:
                output = await queue.get()
                if output is None:
                    raise Aborted
                yield output
                if output.finished is not None:
                    return
        finally:
            self.scheduler.abort(request)
            del self._queues[request]
            self._wake.set()
            if not self._queues:
                self._quiet.set()

    async def quiet(self) -> None:
        await self._quiet.wait()

    def abort_all(self) -> None:
        """Abort every request; its iteration raises :class:`Aborted`."""
        for request, queue in self._queues.items():
            if request.finished is None:
                self.scheduler.abort(request)
                queue.put_nowait(None)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            step = self.scheduler.schedule()
            if step is None:
                self._publish(self.scheduler.news() if self.tells_when_idle else [])
                self._wake.clear()
                await self._wake.wait()
                due = loop.time()
                continue
            due += step.seconds
            await asyncio.sleep(max(0.0, due - loop.time()))
            outputs, events = self.scheduler.complete(step)
            self._publish(events)
            for output in outputs:
                self._queues[output.request].put_nowait(output)

    def _publish(self, events: list[Event]) -> None:
        if events and self.publisher is not None:
            self.publisher.publish(events)
