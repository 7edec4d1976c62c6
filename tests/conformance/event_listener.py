"""What a real engine publishes: from its event socket, as a sidecar reads it, or from its replay socket."""

import threading
import time
from collections.abc import Sequence

import pytest
import zmq
from waiting import wait_for

from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.events import Batch, Stored
from mmrouter_lib.engines.base.launch import EVENTS_PORT, REPLAY_PORT

REPLAY_END = (-1).to_bytes(8, "big", signed=True)


class Listener:
    """Binds the engine's event socket, as a sidecar does, and keeps every message in order. A thread reads
    continuously: a bound subscriber announces its subscription only while its socket is served, and the engine's
    publisher drops messages until then.
    """

    def __init__(self, ip: str, kind: str = "vllm") -> None:
        self._decode = adapter(kind).decode_batch
        self.frames: list[tuple[int, bytes]] = []
        self._arrived = threading.Condition()
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.bind(f"tcp://{ip}:{EVENTS_PORT}")
        self._ip = ip
        self._thread = threading.Thread(target=self._read, name=f"listener {ip}")
        self._thread.start()

    def _read(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(100):
                _, number, payload = self._socket.recv_multipart()
                with self._arrived:
                    self.frames.append((int.from_bytes(number, "big"), payload))
                    self._arrived.notify_all()

    def wait_for_prompt(self, ids: Sequence[int], seconds: float = 20) -> None:
        """Wait for the block with the first tokens of a prompt; messages are ordered, so all earlier ones are there."""
        seen = 0
        deadline = time.monotonic() + seconds
        with self._arrived:
            while True:
                for _, payload in self.frames[seen:]:
                    seen += 1
                    if self._begins(payload, ids):
                        return
                if not self._arrived.wait(deadline - time.monotonic()):
                    pytest.fail(f"the blocks of the last prompt were not published within {seconds:g} s")

    def _begins(self, payload: bytes, ids: Sequence[int]) -> bool:
        return any(
            isinstance(event, Stored) and event.ids.tolist() == list(ids[: len(event.ids)])
            for event in self._decode(payload).events
        )

    def batches(self) -> list[Batch]:
        return [self._decode(payload) for _, payload in self.frames]

    def replayed(self) -> list[tuple[int, bytes]]:
        return replay(self._ip)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close(linger=0)
        self._context.term()


def replay(ip: str, rank: int = 0, seconds: float = 300) -> list[tuple[int, bytes]]:
    """Return everything that a rank of an engine has published, numbered without a gap, from its replay socket.

    The engine's socket drops messages beyond its queue of 1,000 while a reader is slow, so a replay is requested again
    from the first message that is missing.
    """
    got: dict[int, bytes] = {}
    first, before = 0, -1
    while first > before:
        before = first
        end = replay_from(ip, rank, first, got, seconds)
        while first in got:
            first += 1
        if first >= end:
            return sorted(got.items())
    pytest.fail(f"the engine at {ip} does not replay its message {first}, of those before {end}")


def replay_from(ip: str, rank: int, first: int, got: dict[int, bytes], seconds: float) -> int:
    """Add a rank's messages from a number on to ``got``; return the number after its last one."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.connect(f"tcp://{ip}:{REPLAY_PORT + rank}")
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        while dealer.poll(int(seconds * 1000)):
            *_, number, payload = dealer.recv_multipart()
            if number == REPLAY_END:
                return max(got, default=first - 1) + 1
            got[int.from_bytes(number, "big")] = payload
    pytest.fail(f"the engine at {ip} did not replay its events within {seconds:g} s")


class ReplayListener(Listener):
    """Reads what an engine publishes from its replay socket, because a sidecar has bound the other one."""

    def __init__(self, ip: str) -> None:
        self._decode = adapter("vllm").decode_batch
        self._ip = ip
        self._before = len(replay(ip))

    @property
    def frames(self) -> list[tuple[int, bytes]]:  # type: ignore[override]
        """Return the messages since this listener was made."""
        return replay(self._ip)[self._before :]

    def wait_for_prompt(self, ids: Sequence[int], seconds: float = 60) -> None:
        def published() -> bool:
            return any(self._begins(payload, ids) for _, payload in self.frames)

        wait_for(published, seconds, "the blocks of the last prompt are published", every=0.2)
