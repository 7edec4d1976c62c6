"""CPU seconds per million blocks from the wire into the index, for sidecar and router, against Dynamo.

The router gets keys from sidecars and Dynamo gets tokens from engines, so the sum of sidecar and router is compared
beside the router alone. CPU seconds, because other load on the machine disturbs them less than elapsed time.
"""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.feed import sidecar_ingest
from bench.feed.fake_sidecars import Curve, FakeSidecars, address
from bench.measured_process import Child
from bench.peers.dynamo_client import fed_dynamo
from bench.peers.peer_installation import DYNAMO, PeerMissingError
from bench.placing import router_objects
from bench.placing.block_workload import BLOCK_SIZE, STEP, STEPS, BlockWorkload, Event, build, split, steps
from bench.rows import Row, not_run, row
from mmrouter_lib import feed
from mmrouter_lib.block_keys import pack_keys

WORKERS = 64
ROUNDS = 3
SLICE = 4000
"""Deltas in flight at once: a backlog of seconds would make a feed stale, as it should."""
UNIT = "CPU s per M blocks"

Frame = tuple[int, bytes]
"""Worker number and an encoded delta."""


@dataclass(frozen=True, slots=True)
class IngestCase:
    """Events of one size; ``step`` of them form one batch of an engine, which its sidecar makes one delta of."""

    name: str
    load: BlockWorkload
    events: tuple[Event, ...]
    step: int = 1

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

    def deltas(self) -> list[Frame]:
        """Return the feed's frames, numbered per worker."""
        seqs = [0] * self.load.workers
        frames = []
        for batch in steps(self.events, self.step):
            worker, keys = batch[0].worker, itertools.chain.from_iterable(event.keys for event in batch)
            seqs[worker] += 1
            frames.append((worker, feed.encode(router_objects.delta(seqs[worker], pack_keys(keys)))))
        return frames


def cases() -> list[IngestCase]:
    """Return prefill-like and decode-like events; fewer of the latter, which cost much more per block."""
    large = build(workers=WORKERS, blocks_per_worker=4000, queries=0)
    small = build(workers=WORKERS, blocks_per_worker=500, queries=0)
    single = tuple(split(small.events, 1))
    return [
        IngestCase("64-block events", large, large.events),
        IngestCase(STEPS, small, single, STEP),
        IngestCase("1-block events", small, single),
    ]


def run() -> list[Row]:
    """Measure all cases; medians of rounds that take turns."""
    result = sidecar_ingest.run()
    sidecars = {item.name: item.value for item in result}
    for case in cases():
        deltas = case.deltas()
        bare, wired, dynamo = [], [], []
        missing = ""
        for _ in range(ROUNDS):
            bare.append(apply(case, deltas))
            wired.append(receive(case, deltas))
            try:
                dynamo.append(dynamo_ingest(case))
            except PeerMissingError as error:
                missing = str(error)
        share = sidecars[f"sidecar ingest, {case.name}: over sockets"]
        assert share is not None
        result += rows(case, bare, wired, share, dynamo, missing)
    return result


def apply(case: IngestCase, deltas: Sequence[Frame]) -> float:
    """Decode and apply deltas without sockets; return CPU seconds. Raises ``RuntimeError`` for missing blocks."""
    fleet, members = router_objects.synced(case.load.workers)
    began = time.process_time()
    for worker, payload in deltas:
        fleet.on_published(members[worker], feed.decode_published(payload))
    seconds = time.process_time() - began
    _require_held(case, [fleet.index.held(worker.slots[0]) for worker in members])
    return seconds


def receive(case: IngestCase, deltas: Sequence[Frame]) -> float:
    """The same over CURVE sockets in a process of its own; return its CPU seconds, all threads."""
    with feed_receiver(case.load.workers) as receiver:
        before = receiver.child.call("cpu")["cpu"]
        after = receiver.publish(deltas)
    _require_held(case, after["held"])
    return float(after["cpu"] - before)


class FeedReceiver:
    """The router's half of the feed in a process of its own, with fake sidecars that feed it."""

    def __init__(self, child: Child, sidecars: FakeSidecars, workers: int) -> None:
        self.child = child
        self._sidecars = sidecars
        self._seqs = [0] * workers

    def publish(self, deltas: Sequence[Frame]) -> dict[str, Any]:
        """Publish deltas; return CPU seconds and number of keys once all are applied."""
        answer: dict[str, Any] = {}
        for first in range(0, len(deltas), SLICE):
            batch = deltas[first : first + SLICE]
            self._sidecars.publish(batch)
            for worker, _ in batch:
                self._seqs[worker] += 1
            answer = self.child.call("settle", seqs=self._seqs)
        return answer


@contextmanager
def feed_receiver(workers: int) -> Iterator[FeedReceiver]:
    """Start a receiver that is synced with so many workers."""
    curve = Curve.fresh()
    with FakeSidecars(workers, curve) as sidecars, Child.module("bench.feed.receiver_process") as child:
        child.call(
            "follow",
            ips=[address(number) for number in range(workers)],
            public=curve.router_public.decode(),
            secret=curve.router_secret.decode(),
            server=curve.sidecar_public.decode(),
        )
        yield FeedReceiver(child, sidecars, workers)


def dynamo_ingest(case: IngestCase) -> float:
    """Feed Dynamo's selection service what engines would publish; return its CPU seconds, all threads."""
    blocks = [len(ids) // BLOCK_SIZE for ids in case.load.probes]
    with fed_dynamo(case.load) as (dynamo, publish):
        before = dynamo.cpu()
        publish(steps(case.events, case.step))
        after = dynamo.settle(blocks)
        # Polling for arrival costs it queries: one more poll shows how much.
        return after - before - (dynamo.settle(blocks) - after)


def _require_held(case: IngestCase, held: Sequence[int]) -> None:
    if list(held) != case.held:
        raise RuntimeError(f"{case.name}: the index holds {sum(held)} blocks instead of {sum(case.held)}")


def rows(
    case: IngestCase,
    bare: Sequence[float],
    wired: Sequence[float],
    sidecar: float,
    dynamo: Sequence[float],
    missing: str,
) -> list[Row]:
    """Return the figures of one case; ``missing`` says why there is no peer."""
    here, over = (case.per_million(statistics.median(times)) for times in (bare, wired))
    name = f"router ingest, {case.name}"
    result = [row(f"{name}: decode and apply", here, UNIT), row(f"{name}: over CURVE sockets", over, UNIT)]
    alone, both = f"{name}: below Dynamo", f"sidecar and router ingest, {case.name}: below Dynamo"
    if missing:
        return [*result, not_run(alone, "x", missing, goal=">= 8"), not_run(both, "x", missing, goal=">= 2")]
    theirs = case.per_million(statistics.median(dynamo))
    peer = f"{DYNAMO}, from engine events: {theirs:.4g} {UNIT}"
    return [
        *result,
        row(alone, theirs / over, "x", peer=peer, goal=">= 8"),
        row(both, theirs / (over + sidecar), "x", peer=peer, goal=">= 2"),
    ]
