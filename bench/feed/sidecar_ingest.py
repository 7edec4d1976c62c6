"""CPU seconds per million blocks in the sidecar: engine batches in, journal and feed out. The goal is 200,000 blocks/s
of 16 tokens in 64-block events on half a core; a burst costs fewer wake-ups than a steady rate (docs/performance.md).
"""

import itertools
import math
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from bench.child_process import Process
from bench.feed.fake_sidecars import Curve
from bench.placing.workload import BLOCK_SIZE, STEP, STEPS, Event, build, resource, split, steps, vllm_payload
from bench.report import Row, percentile, row
from mmrouter_lib import feed
from mmrouter_lib.block_keys import block_keys, unpack_keys
from mmrouter_sidecar.engine.event_order import EventStream, NextBatch
from mmrouter_sidecar.feed.relay import EventRelay
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Ports
from mmrouter_sidecar.settings_loader import load

UNIT = "CPU s per M blocks"
PACED_RATE = 200_000
"""Blocks per second of the steady rate."""
PACED_SEEDS = 12
"""Workloads of 50,000 blocks one after the other: 3 s."""
PACED_GOAL = "<= 0.5"
LAG_RATE, LAG_SEEDS = 50_000, 2
"""Blocks per second, and workloads of 50,000 blocks: 2 s."""
LAG_GOAL = "<= 20"
TOKEN_UNIT, TOKEN_GOAL = "CPU s per M tokens", "<= 0.04"
GOAL = "<= 2.5"
ROUNDS = 5
BATCHES_PER_FLUSH = 16
"""5 ms of 200,000 blocks/s in 64-block events."""
HOST = "127.78.0.1"
PORTS = Ports()
SILENCE_SECONDS = 60.0
PORTION_SECONDS = 0.001
"""Sending interval of the steady rate; a finer one would burden the machine that it measures."""
LAST_IDS = array("I", range(BLOCK_SIZE))
LAST = vllm_payload(Event(0, None, array("Q", [1]), LAST_IDS, array("Q", [1])))
"""A batch with one unique block: when it arrives, everything before it has been applied."""


@dataclass(frozen=True, slots=True)
class SidecarCase:
    """Payloads in order, and the number of blocks in them."""

    name: str
    payloads: tuple[bytes, ...]
    blocks: int
    goal: str | None = None


def cases() -> list[SidecarCase]:
    """Return prefill-like and decode-like events."""
    work = build(workers=1, blocks_per_worker=60_000, queries=0)
    stores = tuple(vllm_payload(event) for event in work.events)
    small = list(split(work.events, 1))[:10_000]
    return [
        SidecarCase("64-block events", stores, work.blocks, GOAL),
        SidecarCase(STEPS, tuple(vllm_payload(*batch) for batch in steps(small, STEP)), len(small)),
        SidecarCase("1-block events", tuple(vllm_payload(event) for event in small), len(small)),
    ]


def steady_case(seeds: int = PACED_SEEDS) -> SidecarCase:
    """Return 50,000 blocks per seed of prefill-like events; seeds share no blocks."""
    works = [build(workers=1, blocks_per_worker=50_000, queries=0, seed=seed) for seed in range(1, seeds + 1)]
    payloads = tuple(vllm_payload(event) for work in works for event in work.events)
    blocks = sum(work.blocks for work in works)
    return SidecarCase("64-block events", payloads, blocks)


def run() -> list[Row]:
    """Measure every case; the best of rounds, because other load only adds."""
    rows: list[Row] = []
    for case in cases():
        wired = [run_process(case) for _ in range(ROUNDS)]
        name = f"sidecar ingest, {case.name}"
        per_million = 1e6 / case.blocks
        rows.append(row(f"{name}: over sockets", min(wired) * per_million, UNIT, goal=case.goal))
        if case.goal:
            per_token = min(wired) * per_million / BLOCK_SIZE
            rows.append(row(f"{name}: per M tokens, over sockets", per_token, TOKEN_UNIT, goal=TOKEN_GOAL))
    steady = steady_case()
    seconds = steady.blocks / PACED_RATE
    cores = [run_process(steady, PACED_RATE) / seconds for _ in range(ROUNDS)]
    name = f"sidecar ingest, {steady.name}: at a steady {PACED_RATE:,} blocks/s"
    rows.append(row(name, min(cores), "core", goal=PACED_GOAL))
    late = min(percentile(lags(steady_case(LAG_SEEDS), LAG_RATE), 0.99) for _ in range(ROUNDS))
    name = f"sidecar ingest, {steady.name}: p99 from an engine to a router at a steady {LAG_RATE:,} blocks/s"
    return [*rows, row(name, late * 1000, "ms", goal=LAG_GOAL)]


def configure(folder: Path, curve: Curve) -> dict[str, str]:
    """Write a sidecar's files; return its environment."""
    curve.write_config(folder, resource(replicas=1), {"identity.key": bytes(range(32))})
    return {
        "MMROUTER_CONFIG": str(folder),
        "MMROUTER_STATE_DIR": str(folder / "state"),
        "MMROUTER_POOL": "worker",
        "POD_UID": "bench",
        "POD_IP": HOST,
        "POD_LOOPBACK": HOST,
    }


def make_relay(folder: Path, publish: Callable[[feed.Published], None]) -> EventRelay:
    """Return the sidecar's relay without sockets, with its journal in a folder."""
    return EventRelay(load(configure(folder, Curve.fresh())), Metrics(), publish)


def relay_batches(relay: EventRelay, payloads: Sequence[bytes]) -> None:
    """Feed it an engine's batches, numbered from 0, as the sidecar process does."""
    stream = EventStream()
    for number, payload in enumerate(payloads):
        for step in stream.live(number, payload):
            if isinstance(step, NextBatch):
                relay.batch(0, step.seq, step.payload, step.digest)
        if number % BATCHES_PER_FLUSH == 0:
            relay.flush()
    relay.flush()


def run_process(case: SidecarCase, blocks_per_second: float = math.inf) -> float:
    """Run a case through ``python -m mmrouter_sidecar``; return its CPU seconds, all threads. Raises ``RuntimeError``
    for a wrong feed and ``TimeoutError`` for a silent one.
    """
    with running_sidecar() as (sidecar, wires, last_key):
        before = sidecar.thread_cpu()
        wires.publish([*case.payloads, LAST], blocks_per_second * len(case.payloads) / case.blocks)
        held = wires.follow_until(last_key)
        after = sidecar.thread_cpu()
    if held != case.blocks + 1:
        raise RuntimeError(f"{case.name}: the feed holds {held} blocks instead of {case.blocks + 1}")
    return after - before


def lags(case: SidecarCase, blocks_per_second: float) -> list[float]:
    """Run a case of stores alone through ``python -m mmrouter_sidecar``; return each batch's seconds to the router.
    From just before the engine's publisher sends it until a delta with its last block is at the router's socket.
    """
    ends = list(itertools.accumulate(len(msgspec.msgpack.decode(raw)[1][0]["block_hashes"]) for raw in case.payloads))
    with running_sidecar() as (_, wires, _):
        rate = blocks_per_second * len(case.payloads) / case.blocks
        engine = threading.Thread(target=wires.publish, args=(case.payloads, rate), name="engine", daemon=True)
        engine.start()
        arrived = wires.arrivals(ends)
        engine.join()
    return [arrival - sent for arrival, sent in zip(arrived, wires.sent, strict=True)]


class Wires(AbstractContextManager["Wires"]):
    """The sockets of an engine and of a router, in this process."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.curve = Curve.fresh()
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._sub = self._context.socket(zmq.SUB)
        self.sent: list[float] = []
        """Time at which each payload was handed to the engine's socket."""
        self._pub.set_hwm(0)
        self._replay.bind(f"tcp://{HOST}:{PORTS.replay}")
        self._sub.setsockopt(zmq.RCVHWM, 0)
        self._sub.setsockopt(zmq.CURVE_PUBLICKEY, self.curve.router_public)
        self._sub.setsockopt(zmq.CURVE_SECRETKEY, self.curve.router_secret)
        self._sub.setsockopt(zmq.CURVE_SERVERKEY, self.curve.sidecar_public)
        self._sub.subscribe(b"")

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def connect(self) -> None:
        """Connect both ends; return once the sidecar has requested its first replay and the router receives frames."""
        self._sub.connect(f"tcp://{HOST}:{PORTS.pub}")
        self._frame()
        self._pub.connect(f"tcp://{HOST}:{PORTS.events}")
        if not self._replay.poll(int(SILENCE_SECONDS * 1000)):
            raise TimeoutError("the sidecar requested no replay")
        client, empty, _ = self._replay.recv_multipart()
        self._replay.send_multipart([client, empty, b"", b"\xff" * 8, b""])

    def publish(self, payloads: Sequence[bytes], per_second: float = math.inf) -> None:
        """Publish as an engine does, numbered from 0, at most ``per_second`` on average."""
        began = time.monotonic()
        self.sent.clear()
        for number, payload in enumerate(payloads):
            ahead = number / per_second - (time.monotonic() - began)
            if ahead > 0:
                time.sleep(ahead + PORTION_SECONDS)
            self.sent.append(time.monotonic())
            self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def arrivals(self, ends: Sequence[int]) -> list[float]:
        """Return, per n, when the first ``ends[n]`` stored blocks had arrived, in the order of their events."""
        arrived, times = 0, list[float]()
        while len(times) < len(ends):
            frame = self._frame()
            if isinstance(frame, feed.Delta):
                arrived += len(frame.stored) // 8
                now = time.monotonic()
                while len(times) < len(ends) and ends[len(times)] <= arrived:
                    times.append(now)
        return times

    def follow_until(self, key: int) -> int:
        """Apply deltas until one stores ``key``; return the number of keys held then."""
        held: set[int] = set()
        while key not in held:
            frame = self._frame()
            if isinstance(frame, feed.Delta):
                held.difference_update(unpack_keys(frame.removed))
                held.update(unpack_keys(frame.stored))
        return len(held)

    def _frame(self) -> feed.Published:
        if not self._sub.poll(int(SILENCE_SECONDS * 1000)):
            raise TimeoutError("the feed is silent")
        return feed.decode_published(self._sub.recv())


@contextmanager
def running_sidecar() -> Iterator[tuple[Process, Wires, int]]:
    """Start a sidecar; yields it, its engine's and router's sockets, connected, and the key of :data:`LAST`."""
    with tempfile.TemporaryDirectory(prefix="mmrouter-bench-") as folder, Wires() as wires:
        environment = configure(Path(folder), wires.curve)
        (last_key,) = block_keys(LAST_IDS, BLOCK_SIZE, (), load(environment).seed(None, None))
        with Process("sidecar", [sys.executable, "-m", "mmrouter_sidecar"], environment, stderr=None) as sidecar:
            wires.connect()
            yield sidecar, wires, last_key
