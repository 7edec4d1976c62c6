"""Sidecars without engines: the sending end of the feed over real CURVE sockets, in one thread."""

import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import zmq

from bench.placing.workload import heartbeat, snapshot
from mmrouter_lib import feed
from mmrouter_router.fleet.feed_client import PUB_PORT, ROUTER_PORT

BEAT_SECONDS = 0.5
POLL_MS = 20
BURST = 200
"""Deltas sent between two polls for requests and heartbeats."""


@dataclass(frozen=True, slots=True)
class Curve:
    """CURVE key pairs (Z85) of a run: one for the sidecars, one for the routers."""

    sidecar_public: bytes
    sidecar_secret: bytes
    router_public: bytes
    router_secret: bytes

    @classmethod
    def fresh(cls) -> Self:
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def write_config(self, folder: Path, resource: object, secrets: Mapping[str, bytes]) -> None:
        """Write the files that routers and sidecars read (docs/architecture.md, Wiring)."""
        (folder / "secrets").mkdir(parents=True)
        (folder / "deployment.json").write_text(json.dumps(resource))
        keys = {field.name.replace("_", ".curve."): getattr(self, field.name) for field in fields(self)}
        for name, value in {**secrets, **keys}.items():
            (folder / "secrets" / name).write_bytes(value)


_NET = (random.randrange(64, 192), random.randrange(250))
"""A pod's ports are fixed, so concurrent runs need addresses of their own."""
FRONTEND = f"127.{_NET[0]}.{_NET[1]}.254"


def address(number: int) -> str:
    """Return the loopback address of worker ``number``, below 1000, in this run."""
    return f"127.{_NET[0]}.{_NET[1] + number // 250}.{number % 250 + 1}"


class FakeSidecars(AbstractContextManager["FakeSidecars"]):
    """Answers snapshot requests, sends heartbeats, and publishes the deltas that it is given."""

    def __init__(self, workers: int, curve: Curve, held: Sequence[bytes] = ()) -> None:
        """``held``: the packed keys of each worker's snapshot; empty by default."""
        self._held = held or [b""] * workers
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._curve = curve
        self._pubs = [self._socket(zmq.PUB, f"tcp://{address(n)}:{PUB_PORT}") for n in range(workers)]
        self._routers = [self._socket(zmq.ROUTER, f"tcp://{address(n)}:{ROUTER_PORT}") for n in range(workers)]
        self._seqs = [0] * workers
        self._job: Sequence[tuple[int, bytes]] = ()
        self._next = 0
        self._done = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake sidecars", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def publish(self, deltas: Sequence[tuple[int, bytes]]) -> None:
        """Send encoded deltas, each with its worker's number, in order; return when all are sent."""
        self._done.clear()
        self._next, self._job = 0, deltas
        if not self._done.wait(120):
            raise TimeoutError("the deltas were not sent within 120 s")

    def _serve(self) -> None:
        poller = zmq.Poller()
        for router in self._routers:
            poller.register(router, zmq.POLLIN)
        beat_at = 0.0
        while not self._stop.is_set():
            for router, _ in poller.poll(0 if self._job else POLL_MS):
                self._answer(router)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_SECONDS
                for number, pub in enumerate(self._pubs):
                    pub.send(feed.encode(heartbeat(f"uid-{number}", self._seqs[number])))
            if self._job:
                self._send()

    def _send(self) -> None:
        for worker, payload in self._job[self._next : self._next + BURST]:
            self._pubs[worker].send(payload)
            self._seqs[worker] += 1
        self._next += BURST
        if self._next >= len(self._job):
            self._job = ()
            self._done.set()

    def _answer(self, router: "zmq.Socket[bytes]") -> None:
        peer, empty, payload = router.recv_multipart()
        request = feed.decode_request(payload)
        if isinstance(request, feed.Work):
            self._pubs[self._routers.index(router)].send(payload)
            return
        answer: feed.Reply
        if isinstance(request, feed.SnapshotRequest):
            number = self._routers.index(router)
            answer = snapshot(request.id, f"uid-{number}", self._held[number])
        else:  # a replay request would mean a lost delta, and a wrong figure
            answer = feed.Refused(request.id, "no replay in benchmarks")
        router.send_multipart([peer, empty, feed.encode(answer)])

    def _socket(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._curve.sidecar_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._curve.sidecar_secret)
        socket.bind(endpoint)
        return socket
