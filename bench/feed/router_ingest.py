"""CPU seconds per million blocks from the wire into the index, for sidecar and router, against Dynamo
(docs/performance.md, *ingest*). CPU seconds, because other load disturbs them less than elapsed time.
"""

import asyncio
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from bench.child_process import Child, serve
from bench.feed import sidecar_ingest
from bench.feed.fake_sidecars import Curve, FakeSidecars, address
from bench.peer_routers import DYNAMO, PeerMissingError, fed_dynamo
from bench.placing import workload
from bench.placing.workload import STEP, STEPS, BlockWorkload, Event, build, split, steps
from bench.report import Row, not_run, row
from mmrouter_lib import feed
from mmrouter_lib.block_keys import pack_keys
from mmrouter_router.core.settings import CurveKeys
from mmrouter_router.fleet.feed_client import FeedClient, feed_context
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.telemetry.metrics import Metrics

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
            frames.append((worker, feed.encode(workload.delta(seqs[worker], pack_keys(keys)))))
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
        wired, dynamo = [], []
        missing = ""
        for _ in range(ROUNDS):
            wired.append(receive(case, deltas))
            try:
                dynamo.append(dynamo_ingest(case))
            except PeerMissingError as error:
                missing = str(error)
        share = sidecars[f"sidecar ingest, {case.name}: over sockets"]
        assert share is not None
        result += rows(case, wired, share, dynamo, missing)
    return result


def receive(case: IngestCase, deltas: Sequence[Frame]) -> float:
    """Receive and apply deltas over CURVE sockets in a process of its own; return its CPU seconds, all threads. Raises
    ``RuntimeError`` for missing blocks.
    """
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
    curve = Curve.fresh()
    with FakeSidecars(workers, curve) as sidecars, Child.module("bench.feed.router_ingest") as child:
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
    with fed_dynamo(case.load) as dynamo:
        before = float(dynamo.call("cpu")["cpu"])
        dynamo.publish(steps(case.events, case.step))
        after = dynamo.settle()
        # Polling for arrival costs it queries: one more poll shows how much.
        return after - before - (dynamo.settle() - after)


def _require_held(case: IngestCase, held: Sequence[int]) -> None:
    if list(held) != case.held:
        raise RuntimeError(f"{case.name}: the index holds {sum(held)} blocks instead of {sum(case.held)}")


def rows(case: IngestCase, wired: Sequence[float], sidecar: float, dynamo: Sequence[float], missing: str) -> list[Row]:
    """Return the figures of one case; ``missing`` says why there is no peer."""
    over = case.per_million(statistics.median(wired))
    name = f"router ingest, {case.name}"
    result = [row(f"{name}: over CURVE sockets", over, UNIT)]
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


SETTLE_SECONDS = 60.0
POLL_SECONDS = 0.02


class Receiver:
    def __init__(self) -> None:
        self._metrics = Metrics()
        self._fleet = Fleet(self._metrics)
        self._workers: list[Worker] = []
        self._feeds: list[asyncio.Task[None]] = []

    async def follow(self, ips: list[str], public: str, secret: str, server: str) -> dict[str, Any]:
        """Open a feed per worker; answer when all are synced."""
        keys = (CurveKeys(public.encode(), secret.encode(), server.encode()),)
        context = feed_context()
        for number, ip in enumerate(ips):
            worker = self._fleet.join(Member(f"uid-{number}", f"worker-{number}", ip, "worker", "worker"))
            self._workers.append(worker)
            feed = FeedClient(worker, self._fleet, keys, context, self._metrics)
            self._feeds.append(asyncio.create_task(feed.run()))
        await _poll(lambda: all(worker.routable for worker in self._workers), "not every worker is routable")
        gc.collect()
        gc.freeze()
        return {}

    async def cpu(self) -> dict[str, Any]:
        """Answer the CPU seconds of this process, all threads."""
        return {"cpu": time.process_time()}

    async def settle(self, seqs: list[int]) -> dict[str, Any]:
        """Wait until worker n has applied delta ``seqs[n]``; answer CPU seconds and the number of indexed keys."""
        pairs = list(zip(self._workers, seqs, strict=True))
        await _poll(lambda: all(worker.sync.seq >= seq for worker, seq in pairs), "not every delta arrived")
        return {"cpu": time.process_time(), "held": [self._fleet.index.held(w.slots[0]) for w in self._workers]}


async def _poll(condition: Callable[[], bool], failure: str) -> None:
    try:
        async with asyncio.timeout(SETTLE_SECONDS):
            while not condition():  # noqa: ASYNC110 - an event per delta would add to what is measured
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError as error:
        raise RuntimeError(f"{failure} within {SETTLE_SECONDS:g} s") from error


if __name__ == "__main__":
    uvloop.run(serve(Receiver()))
