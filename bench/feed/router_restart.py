"""From the start of an empty router process until every decision of it is exact, in a large deployment.

64 sidecars hold 16,384 blocks each. The process is the one that a frontend pod runs. It is exact when it says that it
is Ready and its index holds what the sidecars hold; both are looked at from outside. Beside it stands the same without
any blocks, which is the start of the process, its tokenizer and 64 connections.
"""

import json
import statistics
import time
import urllib.error
import urllib.request
from array import array

from bench.feed.fake_sidecars import FRONTEND, Curve, FeedEnds, address
from bench.placing.block_workload import build
from bench.rows import Row, row
from bench.serving.router_processes import CONTROL_TOKEN, Ours
from mmrouter_lib.block_keys import pack_keys

WORKERS = 64
BLOCKS = 16_384
ROUNDS = 5
POLL_SECONDS = 0.01
LIMIT_SECONDS = 60.0


def run() -> list[Row]:
    """Measure both in turns; medians."""
    held = snapshots(WORKERS, BLOCKS)
    curve = Curve.fresh()
    empty, full = [], []
    for _ in range(ROUNDS):
        empty.append(seconds(WORKERS, curve, []))
        full.append(seconds(WORKERS, curve, held))
    name = f"restart, {WORKERS} workers of {BLOCKS:,} blocks"
    return [
        row(f"{name}: start to exact", statistics.median(full), "s", goal="<= 2"),
        row(f"{name}: start to exact, the longest of {ROUNDS}", max(full), "s"),
        row(f"{name}: of it without any blocks", statistics.median(empty), "s"),
    ]


def snapshots(workers: int, blocks: int) -> list["array[int]"]:
    """Return per worker the keys of the blocks that it holds."""
    held: list[array[int]] = [array("Q") for _ in range(workers)]
    for event in build(workers=workers, blocks_per_worker=blocks, queries=0).events:
        held[event.worker].extend(event.keys)
    return held


def seconds(workers: int, curve: Curve, held: list["array[int]"]) -> float:
    """Start a router over sidecars that hold these keys; return the seconds until it is exact.

    Raises ``TimeoutError`` where it is not in time.
    """
    wanted = {f"uid-{number}": len(keys) for number, keys in enumerate(held)} or dict.fromkeys(
        (f"uid-{number}" for number in range(workers)), 0
    )
    packed = [pack_keys(keys) for keys in held]
    with FeedEnds(workers, curve, packed):
        began = time.perf_counter()
        with Ours(FRONTEND, [address(number) for number in range(workers)], curve, policy="kv") as router:
            while True:
                if _ready(router.host) and _held(router.host) == wanted:
                    return time.perf_counter() - began
                if time.perf_counter() - began > LIMIT_SECONDS:
                    raise TimeoutError(f"the router holds {_held(router.host)} after {LIMIT_SECONDS:g} s")
                time.sleep(POLL_SECONDS)


def _ready(host: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{host}:9090/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _held(host: str) -> dict[str, int]:
    """Return the blocks that the index holds of each worker that may be chosen by them."""
    request = urllib.request.Request(
        f"http://{host}:8001/control/state", headers={"authorization": f"Bearer {CONTROL_TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=5) as answer:
        workers = json.load(answer)["workers"]
    return {row["uid"]: sum(row["held"].values()) for row in workers if row["standing"] == "verified"}
