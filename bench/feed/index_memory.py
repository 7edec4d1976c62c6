"""Memory of the index per block, against Dynamo.

Growth of the resident memory of a process that does nothing else, from synced and empty feeds to all blocks stored.
Many workers hold the same blocks, as they do where prompts begin alike, so the memory is shown per unique block and per
pair of block and worker.
"""

import psutil

from bench.feed.router_ingest import IngestCase, feed_receiver
from bench.measured_process import Child
from bench.peers.dynamo_client import fed_dynamo
from bench.peers.peer_installation import DYNAMO, PeerMissingError
from bench.placing.block_workload import BLOCK_SIZE, BlockWorkload, build
from bench.rows import Row, not_run, row

WORKERS = 64
BLOCKS = 16_000
GOAL = "<= 0.7"


def run() -> list[Row]:
    """Measure both with the same blocks."""
    load = build(workers=WORKERS, blocks_per_worker=BLOCKS, queries=0)
    own, theirs, missing = index_growth(load), None, ""
    try:
        theirs = dynamo_growth(load)
    except PeerMissingError as error:
        missing = str(error)
    return rows(load, own, theirs, missing)


def rows(load: BlockWorkload, own: int, theirs: int | None, missing: str) -> list[Row]:
    """Return the figures; ``own`` and ``theirs`` in bytes, ``missing`` says why there is no peer."""
    unique = len({key for event in load.events for key in event.keys})
    name = f"memory, {load.workers} workers"
    result = [
        row(f"{name}: per unique block", own / unique, "bytes"),
        row(f"{name}: per block and worker", own / load.blocks, "bytes"),
    ]
    ratio = f"{name}: per unique block, over Dynamo"
    if theirs is None:
        return [*result, not_run(ratio, "x", missing, goal=GOAL)]
    return [*result, row(ratio, own / theirs, "x", peer=f"{DYNAMO}: {theirs / unique:.4g} bytes", goal=GOAL)]


def index_growth(load: BlockWorkload) -> int:
    """Return the bytes by which the router's half of the feed grows. Raises ``RuntimeError`` for missing blocks."""
    with feed_receiver(load.workers) as receiver:
        before = _resident(receiver.child)
        held = receiver.publish(IngestCase("memory", load, load.events).deltas())["held"]
        if sum(held) != load.blocks:
            raise RuntimeError(f"the index holds {sum(held)} blocks instead of {load.blocks}")
        return _resident(receiver.child) - before


def dynamo_growth(load: BlockWorkload) -> int:
    """Return the bytes by which Dynamo's selection service grows. Raises :class:`PeerMissingError`."""
    with fed_dynamo(load) as (dynamo, publish):
        before = _resident(dynamo)
        publish((event,) for event in load.events)
        dynamo.settle([len(ids) // BLOCK_SIZE for ids in load.probes])
        return _resident(dynamo) - before


def _resident(child: Child) -> int:
    """Return the resident memory of a process and its children, in bytes."""
    root = psutil.Process(child.pid)
    return sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))
