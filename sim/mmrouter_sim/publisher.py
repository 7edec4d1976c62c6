"""Publish KV events as vLLM does: a PUB socket for new batches, and a ROUTER socket that replays the last ones.

Frames are ``[topic][sequence, 8 bytes big-endian][payload]`` (docs/engine-facts/vllm.md#kv-event-flags). The PUB socket
binds wildcard and in-process addresses and *connects* to any other; the replay socket always binds; the rank is added
to tcp ports. A new process restarts at sequence 0 without notice.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import zmq

from mmrouter_sim.core.events import Event, encode_events

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

    def resolved(self, rank: int) -> "EventsConfig":
        """Return the configuration of one rank, with every default filled in. Raises ``ValueError``."""
        return msgspec.structs.replace(
            self,
            publisher=self.publisher or ("zmq" if self.enable_kv_cache_events else "null"),
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


def binds(endpoint: str) -> bool:
    """Return whether the engine's PUB socket binds this endpoint; it connects to any other."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class Publisher:
    """The sockets of one rank. ``clock`` gives the seconds since 1970 that go into each batch."""

    def __init__(
        self, config: EventsConfig, rank: int, clock: Callable[[], float] = time.time, *, bind: bool | None = None
    ) -> None:
        """``bind``: whether the PUB socket binds; ``None``: by its address (:func:`binds`)."""
        self._bind = binds(config.endpoint) if bind is None else bind
        self.config = config.resolved(rank)
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
        if self._bind:
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
