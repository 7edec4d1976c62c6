"""Hand-over of 4 and 16 MB between processes, against a plain copy, which no hand-over by copy can beat
(docs/performance.md, docs/transfer.md#what-it-costs).
"""

import asyncio
import gc
import mmap
import random
import statistics
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.child_process import Child, serve
from bench.report import AnswersDifferError, Row, not_run, row
from mmrouter_handover.shm import Pool, Reader, read_handle

MB = 1 << 20
SIZES = (4 * MB, 16 * MB)
IN_FLIGHT = (8, 1)
ROUNDS = 25
"""Of eight payloads; with one in flight, eight times as many."""
GOAL = "<= 1.2"
TMPFS = Path("/dev/shm")


class PayloadReader:
    """The commands of the reading process: this module, run as a program. Times cover everything from the received name
    to a usable payload, and its release. ``summed`` asks for a CRC-32 of the payload too, outside the time.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def read(self, sent: dict[str, Any], summed: bool) -> dict[str, Any]:
        """Read a payload where it lies, by its handle."""
        began = time.perf_counter()
        view = self._reader.open(read_handle(sent))
        opened = time.perf_counter()
        answer = {"sum": zlib.crc32(view.data)} if summed else {}
        resumed = time.perf_counter()
        view.release()
        return {**answer, "seconds": opened - began + time.perf_counter() - resumed}


@dataclass
class Times:
    """Seconds per payload, in the order of the payloads; ``copy`` is the floor."""

    copy: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [(wrote + read) / copy for wrote, read, copy in zip(self.write, self.read, self.copy, strict=True)]

    @property
    def best(self) -> float:
        """The ratio of the shortest times, which approaches that of a machine without other load."""
        return (min(self.write) + min(self.read)) / min(self.copy)


def run() -> list[Row]:
    """Measure all sizes; medians over payloads, because other load comes in bursts."""
    if not TMPFS.is_dir():
        return [not_run(f"ratio_to_memcpy, {size // MB} MB", "x", "no /dev/shm", goal=GOAL) for size in SIZES]
    result: list[Row] = []
    for in_flight in IN_FLIGHT:
        for size in SIZES:
            result += rows(measure(size, in_flight, ROUNDS * IN_FLIGHT[0] // in_flight), size, in_flight)
    return result


def rows(times: Times, size: int, in_flight: int) -> list[Row]:
    main = in_flight == IN_FLIGHT[0]
    where = f"{size // MB} MB" if main else f"{size // MB} MB, one in flight"
    copy, write, read = (1e3 * statistics.median(values) for values in (times.copy, times.write, times.read))
    floor = f"memcpy: {copy:.3g} ms"
    return [
        row(f"ratio_to_memcpy, {where}", statistics.median(times.ratios), "x", peer=floor, goal=GOAL if main else None),
        row(f"ratio_to_memcpy, {where}, best of all", times.best, "x"),
        row(f"hand-over, {where}: write", write, "ms"),
        row(f"hand-over, {where}: read", read, "ms"),
    ]


def measure(size: int, in_flight: int, rounds: int) -> Times:
    """Return the times of rounds in which copy and hand-over take turns. Raises :class:`AnswersDifferError`."""
    payloads = [random.Random(number).randbytes(size) for number in range(in_flight)]
    sums = [zlib.crc32(payload) for payload in payloads]
    floors = [memoryview(mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)) for _ in payloads]
    times = Times()
    limit = 4 * in_flight * size + MB
    with (
        tempfile.TemporaryDirectory(prefix="mmrouter-bench-", dir=TMPFS) as root,
        Pool(root, "bench", limit_bytes=limit) as pool,
        Child.module("bench.shm_transfer", root) as reader,
    ):
        gc.collect()
        gc.disable()
        try:
            for number in range(-1, rounds):  # the first round warms up and compares the payloads
                into = times if number >= 0 else Times()
                expected = sums if number < 0 else []
                _floor(into, payloads, floors)
                _ours(into, payloads, pool, reader, expected)
        finally:
            gc.enable()
    return times


def _floor(into: Times, payloads: list[bytes], floors: list[memoryview]) -> None:
    for payload, floor in zip(payloads, floors, strict=True):
        began = time.perf_counter()
        floor[:] = payload
        into.copy.append(time.perf_counter() - began)


def _ours(into: Times, payloads: list[bytes], pool: Pool, reader: Child, expected: list[int]) -> None:
    sent = []
    for number, payload in enumerate(payloads):
        began = time.perf_counter()
        lease = pool.put(payload, f"payload {number}")
        assert lease.handle is not None
        sent.append(lease.handle.to_json())
        into.write.append(time.perf_counter() - began)
    for number, handle in enumerate(sent):
        answer = reader.call("read", sent=handle, summed=bool(expected))
        if expected and answer["sum"] != expected[number]:
            raise AnswersDifferError(f"payload {number}: CRC-32 {answer['sum']} instead of {expected[number]}")
        into.read.append(answer["seconds"])


if __name__ == "__main__":
    gc.disable()
    with Reader(sys.argv[1]) as reader:
        asyncio.run(serve(PayloadReader(reader)))
