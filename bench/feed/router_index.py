"""Memory of the index per block, against Dynamo; and the time from a router's start until all its decisions are exact
(docs/performance.md, *memory* and *restart*).
"""

import statistics
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass

import httpx

from bench.feed.fake_sidecars import FRONTEND, Curve, FakeSidecars, address
from bench.feed.router_ingest import IngestCase, feed_receiver
from bench.peer_routers import DYNAMO, PeerMissingError, fed_dynamo
from bench.placing.workload import BlockWorkload, build
from bench.report import Row, not_run, row
from bench.serving.router_processes import Ours
from mmrouter_lib.block_keys import pack_keys

WORKERS = 64
MEMORY_BLOCKS, RESTART_BLOCKS = 16_000, 16_384
"""Blocks of each worker."""
MEMORY_GOAL = "<= 0.7"
RESTARTS = ((WORKERS, 5, "<= 2"), (960, 1, "<= 5"))
"""Workers, rounds and goal."""
POLL_SECONDS = 0.01
LIMIT_SECONDS = 300.0


def memory() -> list[Row]:
    load = build(workers=WORKERS, blocks_per_worker=MEMORY_BLOCKS, queries=0)
    own, theirs, missing = index_growth(load), None, ""
    try:
        theirs = dynamo_growth(load)
    except PeerMissingError as error:
        missing = str(error)
    return memory_rows(load, own, theirs, missing)


def memory_rows(load: BlockWorkload, own: int, theirs: int | None, missing: str) -> list[Row]:
    """Return the figures; ``own`` and ``theirs`` in bytes, ``missing`` says why there is no peer."""
    unique = len({key for event in load.events for key in event.keys})
    name = f"memory, {load.workers} workers"
    result = [
        row(f"{name}: per unique block", own / unique, "bytes"),
        row(f"{name}: per block and worker", own / load.blocks, "bytes"),
    ]
    ratio = f"{name}: per unique block, over Dynamo"
    if theirs is None:
        return [*result, not_run(ratio, "x", missing, goal=MEMORY_GOAL)]
    return [*result, row(ratio, own / theirs, "x", peer=f"{DYNAMO}: {theirs / unique:.4g} bytes", goal=MEMORY_GOAL)]


def index_growth(load: BlockWorkload) -> int:
    """Return the bytes by which the router's half of the feed grows. Raises ``RuntimeError`` for missing blocks."""
    with feed_receiver(load.workers) as receiver:
        before = receiver.child.resident()
        held = receiver.publish(IngestCase("memory", load, load.events).deltas())["held"]
        if sum(held) != load.blocks:
            raise RuntimeError(f"the index holds {sum(held)} blocks instead of {load.blocks}")
        return receiver.child.resident() - before


def dynamo_growth(load: BlockWorkload) -> int:
    """Return the bytes by which Dynamo's selection service grows. Raises :class:`PeerMissingError`."""
    with fed_dynamo(load) as dynamo:
        before = dynamo.resident()
        dynamo.publish((event,) for event in load.events)
        dynamo.settle()
        return dynamo.resident() - before


def restart() -> list[Row]:
    rows: list[Row] = []
    for workers, rounds, goal in RESTARTS:
        some = snapshots(min(workers, WORKERS), RESTART_BLOCKS)
        held = [some[number % len(some)] for number in range(workers)]  # more workers hold the same conversations
        curve = Curve.fresh()
        empty, full = [], []
        for _ in range(rounds):
            empty.append(started(workers, curve, []))
            full.append(started(workers, curve, held))
        rows += restart_rows(workers, held, empty, full, goal)
    return rows


def restart_rows(
    workers: int, held: list["array[int]"], empty: list["Started"], full: list["Started"], goal: str
) -> list[Row]:
    name = f"restart, {workers} workers of {len(held[0]):,} blocks"
    unique, pairs = len(set().union(*held)), sum(map(len, held))
    grown = statistics.median(each.resident for each in full) - statistics.median(each.resident for each in empty)
    return [
        row(f"{name}: start to exact", statistics.median(each.seconds for each in full), "s", goal=goal),
        row(f"{name}: start to exact, the longest of {len(full)}", max(each.seconds for each in full), "s"),
        row(f"{name}: of it without any blocks", statistics.median(each.seconds for each in empty), "s"),
        row(f"{name}: memory per unique block", grown / unique, "bytes"),
        row(f"{name}: memory per block and worker", grown / pairs, "bytes"),
    ]


def snapshots(workers: int, blocks: int) -> list["array[int]"]:
    held: list[array[int]] = [array("Q") for _ in range(workers)]
    for event in build(workers=workers, blocks_per_worker=blocks, queries=0).events:
        held[event.worker].extend(event.keys)
    return held


@dataclass(frozen=True)
class Started:
    """A router that became exact: seconds after its start, and its resident memory in bytes."""

    seconds: float
    resident: int


def started(workers: int, curve: Curve, held: list["array[int]"]) -> Started:
    """Start a router over sidecars that hold these keys and wait until it is exact. Raises ``TimeoutError`` after
    :data:`LIMIT_SECONDS`.
    """
    wanted = {f"uid-{number}": len(held[number]) if held else 0 for number in range(workers)}
    packed = [pack_keys(keys) for keys in held]
    with FakeSidecars(workers, curve, packed):
        began = time.perf_counter()
        with Ours(FRONTEND, [address(number) for number in range(workers)], curve, policy="kv") as router:
            indexed: dict[str, int] = {}
            while indexed != wanted:
                if time.perf_counter() - began > LIMIT_SECONDS:
                    raise TimeoutError(f"the router holds {indexed} after {LIMIT_SECONDS:g} s")
                time.sleep(POLL_SECONDS * max(1, workers / WORKERS))  # the answer grows with the workers
                with suppress(httpx.HTTPError):
                    indexed = router.held_blocks() if router.ready() else {}
            return Started(time.perf_counter() - began, router.resident())
