"""CPU seconds per million blocks from the wire into the index, sidecar and router apart, against Dynamo.

The router gets keys from sidecars, Dynamo tokens from engines; so besides the router alone the sum of sidecar and
router is compared. CPU seconds, because other load on the machine disturbs them less than it disturbs time.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.command_child import Child
from bench.feed import sidecar_ingest
from bench.feed.fake_sidecars import Curve, FeedEnds, address
from bench.peers.dynamo_client import Dynamo, EngineSockets
from bench.peers.environment import DYNAMO, PeerMissingError
from bench.placing import router_objects as bench_fleet
from bench.placing.block_workload import BLOCK_SIZE, STEP, STEPS, Event, Workload, build, split, steps, vllm_payload
from bench.rows import Row, not_run, row
from mmrouter_lib import feed
from mmrouter_lib.block_keys import pack_keys

WORKERS = 64
ROUNDS = 3
SLICE = 4000
"""Deltas under way at once: a backlog of seconds would make a feed stale, as it should."""
UNIT = "CPU s per M blocks"


@dataclass(frozen=True, slots=True)
class Case:
    """Events of one size."""

    name: str
    load: Workload
    events: tuple[Event, ...]
    step: int = 1  # events in one batch of an engine, which its sidecar makes one delta of

    @property
    def held(self) -> list[int]:
        """Blocks per worker when everything is stored."""
        held = [0] * self.load.workers
        for event in self.events:
            held[event.worker] += len(event.keys)
        return held

    def per_million(self, seconds: float) -> float:
        """Return CPU seconds per million blocks."""
        return seconds / self.load.blocks * 1e6

    def deltas(self) -> list[tuple[int, bytes]]:
        """Return the feed's frames, numbered per worker."""
        seqs = [0] * self.load.workers
        frames = []
        for batch in steps(self.events, self.step):
            worker, keys = batch[0].worker, itertools.chain.from_iterable(event.keys for event in batch)
            seqs[worker] += 1
            frames.append((worker, feed.encode(bench_fleet.delta(seqs[worker], pack_keys(keys)))))
        return frames


def cases() -> list[Case]:
    """Return prefill-like and decode-like events; the latter cost so much per block that fewer are enough."""
    large = build(workers=WORKERS, blocks_per_worker=4000, queries=0)
    small = build(workers=WORKERS, blocks_per_worker=500, queries=0)
    single = tuple(split(small.events, 1))
    return [
        Case("64-block events", large, large.events),
        Case(STEPS, small, single, STEP),
        Case("1-block events", small, single),
    ]


def run() -> list[Row]:
    """Measure both event sizes; medians of rounds that take turns."""
    rows = sidecar_ingest.run()
    sidecars = {item.name: item.value for item in rows}
    for case in cases():
        deltas = case.deltas()
        bare, wired, dynamo = [], [], []
        missing = ""
        for _ in range(ROUNDS):
            bare.append(apply(case, deltas))
            wired.append(receive(case, deltas))
            try:
                dynamo.append(peer(case))
            except PeerMissingError as error:
                missing = str(error)
        share = sidecars[f"sidecar ingest, {case.name}: over sockets"]
        assert share is not None
        rows += _rows(case, bare, wired, share, dynamo, missing)
    return rows


def apply(case: Case, deltas: Sequence[tuple[int, bytes]]) -> float:
    """Decode and apply without sockets; return CPU seconds. Raises ``RuntimeError`` when blocks are missing then."""
    fleet, members = bench_fleet.synced(case.load.workers)
    began = time.process_time()
    for worker, payload in deltas:
        fleet.published(members[worker], feed.decode_published(payload))
    took = time.process_time() - began
    _require(case, [fleet.index.held(worker.slots[0]) for worker in members])
    return took


def receive(case: Case, deltas: Sequence[tuple[int, bytes]]) -> float:
    """The same over ZeroMQ with CURVE, in a process of its own; return its CPU seconds, all threads."""
    curve = Curve.fresh()
    ips = [address(number) for number in range(case.load.workers)]
    with (
        FeedEnds(case.load.workers, curve) as ends,
        Child("receiver", [sys.executable, "-m", "bench.feed.receiver_process"]) as receiver,
    ):
        receiver.call(
            "follow",
            ips=ips,
            public=curve.router_public.decode(),
            secret=curve.router_secret.decode(),
            server=curve.sidecar_public.decode(),
        )
        before = receiver.call("cpu")["cpu"]
        seqs = [0] * case.load.workers
        for first in range(0, len(deltas), SLICE):
            slice_ = deltas[first : first + SLICE]
            ends.publish(slice_)
            for worker, _ in slice_:
                seqs[worker] += 1
            after = receiver.call("settle", seqs=seqs)
    _require(case, after["held"])
    return float(after["cpu"] - before)


def peer(case: Case) -> float:
    """Feed Dynamo's selection service what engines would publish; return its CPU seconds, all threads."""
    payloads = [(batch[0].worker, vllm_payload(*batch)) for batch in steps(case.events, case.step)]
    blocks = [len(ids) // BLOCK_SIZE for ids in case.load.probes]
    with Dynamo() as dynamo, EngineSockets(case.load.workers) as sockets:
        dynamo.start(sockets.endpoints, BLOCK_SIZE)
        sockets.wait()
        dynamo.load(case.load.probes)
        before = dynamo.cpu()
        for worker, payload in payloads:
            sockets.send(worker, payload)
        after = dynamo.settle(blocks)
        # Looking whether everything has arrived costs it queries: one more look says how much.
        return after - before - (dynamo.settle(blocks) - after)


def _require(case: Case, held: Sequence[int]) -> None:
    if list(held) != case.held:
        raise RuntimeError(f"{case.name}: the index holds {sum(held)} blocks instead of {sum(case.held)}")


def _rows(
    case: Case, bare: Sequence[float], wired: Sequence[float], share: float, dynamo: Sequence[float], missing: str
) -> list[Row]:
    here, over = (case.per_million(statistics.median(times)) for times in (bare, wired))
    name = f"router ingest, {case.name}"
    rows = [row(f"{name}: decode and apply", here, UNIT), row(f"{name}: over CURVE sockets", over, UNIT)]
    alone, both = f"{name}: below Dynamo", f"sidecar and router ingest, {case.name}: below Dynamo"
    if missing:
        return [*rows, not_run(alone, "x", missing, goal=">= 8"), not_run(both, "x", missing, goal=">= 2")]
    theirs = case.per_million(statistics.median(dynamo))
    words = f"{DYNAMO}, from engine events: {theirs:.4g} {UNIT}"
    return [
        *rows,
        row(alone, theirs / over, "x", peer=words, goal=">= 8"),
        row(both, theirs / (over + share), "x", peer=words, goal=">= 2"),
    ]
