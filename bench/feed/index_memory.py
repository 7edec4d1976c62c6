"""Memory that the index takes for each block that any worker holds, against Dynamo.

Growth of the resident memory of a process that does nothing else, from all feeds synced and empty to all blocks there.
Many workers hold the same blocks, as they do where prompts begin alike, so beside the unique block the pair of block
and worker is told.
"""

import sys

import psutil

from bench.command_child import Child
from bench.feed.fake_sidecars import Curve, FeedEnds, address
from bench.feed.router_ingest import SLICE
from bench.peers.dynamo_client import Dynamo, EngineSockets
from bench.peers.environment import DYNAMO, PeerMissingError
from bench.placing import router_objects as bench_fleet
from bench.placing.block_workload import BLOCK_SIZE, Workload, build, vllm_payload
from bench.rows import Row, not_run, row
from mmrouter_lib import feed
from mmrouter_lib.block_keys import pack_keys

WORKERS = 64
BLOCKS = 16_000
GOAL = "<= 0.7"


def run() -> list[Row]:
    """Measure both with the same blocks."""
    load = build(workers=WORKERS, blocks_per_worker=BLOCKS, queries=0)
    return rows(load, ours(load), *_peer(load))


def rows(load: Workload, own: int, theirs: int | None, missing: str) -> list[Row]:
    """Return the figures; ``own`` and ``theirs`` in bytes, ``missing`` says why there is no peer."""
    unique = len({key for event in load.events for key in event.keys})
    name = f"memory, {load.workers} workers"
    found = [
        row(f"{name}: per unique block", own / unique, "bytes"),
        row(f"{name}: per block and worker", own / load.blocks, "bytes"),
    ]
    ratio = f"{name}: per unique block, over Dynamo"
    if theirs is None:
        return [*found, not_run(ratio, "x", missing, goal=GOAL)]
    return [*found, row(ratio, own / theirs, "x", peer=f"{DYNAMO}: {theirs / unique:.4g} bytes", goal=GOAL)]


def ours(load: Workload) -> int:
    """Return the bytes by which the router's half of the feed grows."""
    curve = Curve.fresh()
    with (
        FeedEnds(load.workers, curve) as ends,
        Child("receiver", [sys.executable, "-m", "bench.feed.receiver_process"]) as receiver,
    ):
        receiver.call(
            "follow",
            ips=[address(number) for number in range(load.workers)],
            public=curve.router_public.decode(),
            secret=curve.router_secret.decode(),
            server=curve.sidecar_public.decode(),
        )
        before = resident(receiver)
        seqs = [0] * load.workers
        for first in range(0, len(load.events), SLICE):
            frames = []
            for event in load.events[first : first + SLICE]:
                seqs[event.worker] += 1
                frames.append((event.worker, feed.encode(bench_fleet.delta(seqs[event.worker], pack_keys(event.keys)))))
            ends.publish(frames)
            held = receiver.call("settle", seqs=seqs)["held"]
        if sum(held) != load.blocks:
            raise RuntimeError(f"the index holds {sum(held)} blocks instead of {load.blocks}")
        return resident(receiver) - before


def peer(load: Workload) -> int:
    """Return the bytes by which Dynamo's selection service grows. Raises :class:`PeerMissingError`."""
    with Dynamo() as dynamo, EngineSockets(load.workers) as sockets:
        dynamo.start(sockets.endpoints, BLOCK_SIZE)
        sockets.wait()
        dynamo.load(load.probes)
        before = resident(dynamo)
        for event in load.events:
            sockets.send(event.worker, vllm_payload(event))
        dynamo.settle([len(ids) // BLOCK_SIZE for ids in load.probes])
        return resident(dynamo) - before


def resident(child: Child) -> int:
    """Return the resident memory of a process and its children, in bytes."""
    root = psutil.Process(child.pid)
    return sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))


def _peer(load: Workload) -> tuple[int | None, str]:
    try:
        return peer(load), ""
    except PeerMissingError as error:
        return None, str(error)
