"""What the feed and the decisions of a router cost in front of up to 10,000 engines (docs/performance.md, *scale*).

An engine's traffic comes from a simulated cluster in virtual time; a busy engine publishes once per step. Frames cross
real sockets for 64 engines. For larger fleets the router's own code applies them and places requests on a fleet of that
size in this process, and the socket's share is added.
"""

import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.cluster.policy_comparison import SMALL
from bench.cluster.routing_policies import Ours
from bench.cluster.simulation import simulate
from bench.cluster.workloads import servegen
from bench.feed.router_ingest import feed_receiver
from bench.placing import workload
from bench.placing.large_fleet import LargeFleet
from bench.report import Row, row
from mmrouter_lib import feed
from mmrouter_lib.block_keys import pack_keys
from mmrouter_router.fleet.load_gossip import LoadGossip

WIRED = 64
ENGINES = (WIRED, 1000, 3000, 10_000)
ROUTERS = (1, 10)
SAMPLED, SECONDS, LOAD = 8, 60.0, 0.8
"""Engines of the simulated cluster, seconds of their traffic, and their load."""
BLOCKS_PER_WORKER, QUERIES, FRAMES = 200, 100, 20_000
CHANGES = 3
"""Of a request that routers report to each other: it was placed, its first token came, it ended."""


@dataclass(frozen=True)
class Traffic:
    """Of one busy engine, per second: requests, frames of its feed, and blocks that it stores and evicts."""

    requests: float
    frames: float
    blocks: float


@dataclass(frozen=True)
class Costs:
    """CPU microseconds of a router: per frame of the feed, per frame of another router's load, per placement."""

    frame: float
    load: float
    placement: float

    def cores(self, traffic: Traffic, engines: int, routers: int) -> float:
        """Return the CPUs that each router needs, without what a request costs in a fleet of any size."""
        requests = engines * traffic.requests
        feed_us = engines * traffic.frames * self.frame + CHANGES * requests * self.load * (routers > 1)
        return (feed_us + requests / routers * self.placement) / 1e6


def simulated_traffic() -> Traffic:
    load = servegen(True, SAMPLED, LOAD, SECONDS, SMALL)
    counted = Counted(SAMPLED, load.block_size)
    simulate(load, SAMPLED, SMALL, counted)
    busy = SAMPLED * (load.requests[-1].at - load.requests[0].at)
    return Traffic(len(load.requests) / busy, 1 / SMALL.decode_seconds, counted.stored / busy)


class Counted(Ours):
    """The router's policy, which also counts the blocks that engines store."""

    stored = 0

    def cache_changed(self, engine: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.stored += len(stored)
        super().cache_changed(engine, stored, removed)


def frames(seqs: list[int], blocks: int) -> list[tuple[int, bytes]]:
    """Return encoded deltas of random workers, which have sent ``seqs`` before. Each stores as many blocks as an engine
    does in a step, and evicts those of the worker's delta before.
    """
    draw, seqs = random.Random(len(seqs)), seqs.copy()
    held = [b""] * len(seqs)
    made = []
    for _ in range(FRAMES):
        worker = draw.randrange(len(seqs))
        seqs[worker] += 1
        keys = pack_keys(array("Q", [draw.getrandbits(64) for _ in range(blocks)]))
        made.append(
            (worker, feed.encode(feed.Delta(workload.EPOCH, seqs[worker], 0.0, 0, 0, "GPU", keys, held[worker])))
        )
        held[worker] = keys
    return made


def wired_us(deltas: list[tuple[int, bytes]]) -> float:
    """Return a router's CPU microseconds per frame over CURVE sockets, with all threads."""
    with feed_receiver(WIRED) as receiver:
        before = float(receiver.child.call("cpu")["cpu"])
        return (float(receiver.publish(deltas)["cpu"]) - before) / FRAMES * 1e6


def applied(engines: int, blocks: int) -> Costs:
    """Return the costs in a fleet of this size, without sockets."""
    placing = LargeFleet(workload.build(workers=engines, blocks_per_worker=BLOCKS_PER_WORKER, queries=QUERIES))
    fleet = placing.fleet
    workers = list(fleet)
    gossip = LoadGossip("this router", fleet, lambda _: None, lambda: True, lambda: None)
    fleet.work_listeners.append(gossip.on_work)
    deltas = frames([worker.sync.seq or 0 for worker in workers], blocks)
    work = feed.encode(feed.Work("another router", 0, 1, 64.0, 64.0))

    def apply(worker: int, payload: bytes) -> None:
        fleet.on_published(workers[worker], feed.decode_published(payload))

    placing.place(0)
    return Costs(
        frame=_us(lambda number: apply(*deltas[number]), FRAMES),
        load=_us(lambda number: apply(number % engines, work), FRAMES),
        placement=_us(placing.place, QUERIES),
    )


def _us(work: Callable[[int], object], count: int) -> float:
    began = time.thread_time_ns()
    for number in range(count):
        work(number)
    return (time.thread_time_ns() - began) / 1000 / count


def run() -> list[Row]:
    traffic = simulated_traffic()
    blocks = max(1, round(traffic.blocks / traffic.frames))
    deltas = frames([0] * WIRED, blocks)
    over_sockets = wired_us(deltas)
    sent = traffic.frames * sum(len(payload) for _, payload in deltas) / len(deltas) / 1e6
    rows = [
        row("scale: requests of a busy engine per second", traffic.requests, "1/s"),
        row("scale: blocks that it stores per second", traffic.blocks, "1/s"),
        row("scale: its feed to each router, a frame per step", sent, "MB/s"),
        row("scale: CPU per frame over a CURVE socket", over_sockets, "us"),
    ]
    costs = {engines: applied(engines, blocks) for engines in ENGINES}
    socket = over_sockets - costs[WIRED].frame
    for engines, cost in costs.items():
        whole = Costs(cost.frame + socket, cost.load + socket, cost.placement)
        name = f"scale, {engines} busy engines"
        rows += [
            row(f"{name}: feed to each router", sent * engines, "MB/s"),
            row(f"{name}: CPU per frame without its socket", cost.frame, "us"),
            row(f"{name}: CPU per frame of another router's load, without its socket", cost.load, "us"),
            row(f"{name}: CPU per placement", cost.placement, "us"),
            *(
                row(
                    f"{name}, {routers} routers: CPUs of each for feed and placements",
                    whole.cores(traffic, engines, routers),
                    "cores",
                )
                for routers in ROUTERS
            ),
        ]
    return rows
