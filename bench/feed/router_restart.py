"""Time from the start of a router process until all its decisions are exact, in a large deployment.

64 sidecars hold 16,384 blocks each. The process is the one of a frontend pod. It is exact when it reports Ready and its
index holds what the sidecars hold, both observed from outside. The same without any blocks shows the share of starting
the process, its tokenizer and 64 connections.
"""

import json
import statistics
import time
import urllib.error
import urllib.request
from array import array

from bench.feed.fake_sidecars import FRONTEND, Curve, FakeSidecars, address
from bench.placing.block_workload import build
from bench.rows import Row, row
from bench.serving.router_processes import CONTROL_TOKEN, HEALTH_PORT, Ours
from mmrouter_lib.block_keys import pack_keys

WORKERS = 64
BLOCKS = 16_384
ROUNDS = 5
POLL_SECONDS = 0.01
LIMIT_SECONDS = 60.0


def run() -> list[Row]:
    """Measure both in turns."""
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
    """Return the keys that each worker holds."""
    held: list[array[int]] = [array("Q") for _ in range(workers)]
    for event in build(workers=workers, blocks_per_worker=blocks, queries=0).events:
        held[event.worker].extend(event.keys)
    return held


def seconds(workers: int, curve: Curve, held: list["array[int]"]) -> float:
    """Start a router over sidecars that hold these keys; return the seconds until it is exact.

    Raises ``TimeoutError`` after :data:`LIMIT_SECONDS`.
    """
    wanted = {f"uid-{number}": len(held[number]) if held else 0 for number in range(workers)}
    packed = [pack_keys(keys) for keys in held]
    with FakeSidecars(workers, curve, packed):
        began = time.perf_counter()
        with Ours(FRONTEND, [address(number) for number in range(workers)], curve, policy="kv") as router:
            while True:
                if _ready(router.host) and held_blocks(router.host) == wanted:
                    return time.perf_counter() - began
                if time.perf_counter() - began > LIMIT_SECONDS:
                    raise TimeoutError(f"the router holds {held_blocks(router.host)} after {LIMIT_SECONDS:g} s")
                time.sleep(POLL_SECONDS)


def _ready(host: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{host}:{HEALTH_PORT}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def held_blocks(host: str) -> dict[str, int]:
    """Return the number of blocks that a router's index holds of each verified worker, by its uid."""
    request = urllib.request.Request(
        f"http://{host}:8001/control/state", headers={"authorization": f"Bearer {CONTROL_TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=5) as answer:
        workers = json.load(answer)["workers"]
    return {row["uid"]: sum(row["held"].values()) for row in workers if row["standing"] == "verified"}
