"""Hand-over of 4 and 16 MB between processes, against a plain copy and against a fresh segment per payload.

``ratio_to_memcpy`` is the time of writing and reading by ``mmrouter_handover.shm`` over the time of one copy of the
same bytes into existing memory, which no hand-over by copy can beat. Eight payloads are in flight, as of eight
requests; with one, everything lies in the CPU's cache, and costs independent of the size show most.
"""

import gc
import mmap
import random
import statistics
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from bench.handover import fresh_segment
from bench.measured_process import Child
from bench.rows import Row, not_run, row
from mmrouter_handover.shm import Pool

MB = 1 << 20
SIZES = (4 * MB, 16 * MB)
IN_FLIGHT = (8, 1)
ROUNDS = 25
"""Of eight payloads; with one in flight, eight times as many."""
GOAL = "<= 1.2"
TMPFS = Path("/dev/shm")


class PayloadsDifferError(Exception):
    """A reader read other bytes than were written, so times are not comparable."""


@dataclass
class Times:
    """Seconds per payload, in the order of the payloads; ``copy`` is the floor."""

    copy: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    peer_write: list[float] = field(default_factory=list)
    peer_read: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Writing and reading over the preceding copy, of each payload."""
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
    """Return the figures of one case."""
    main = in_flight == IN_FLIGHT[0]
    where = f"{size // MB} MB" if main else f"{size // MB} MB, one in flight"
    copy, write, read = (1e3 * statistics.median(values) for values in (times.copy, times.write, times.read))
    peer_write, peer_read = (1e3 * statistics.median(values) for values in (times.peer_write, times.peer_read))
    floor = f"memcpy: {copy:.3g} ms"
    peer = f"fresh segment, framed, copied out: {peer_write:.3g} + {peer_read:.3g} ms"
    return [
        row(f"ratio_to_memcpy, {where}", statistics.median(times.ratios), "x", peer=floor, goal=GOAL if main else None),
        row(f"ratio_to_memcpy, {where}, best of all", times.best, "x"),
        row(f"hand-over, {where}: write", write, "ms"),
        row(f"hand-over, {where}: read", read, "ms"),
        row(f"hand-over, {where}: below a fresh segment", (peer_write + peer_read) / (write + read), "x", peer=peer),
    ]


def measure(size: int, in_flight: int, rounds: int) -> Times:
    """Return the times of ``rounds`` rounds in which the three ways take turns. Raises :class:`PayloadsDifferError`."""
    payloads = [random.Random(number).randbytes(size) for number in range(in_flight)]
    sums = [zlib.crc32(payload) for payload in payloads]
    floors = [memoryview(mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)) for _ in payloads]
    times = Times()
    limit = 4 * in_flight * size + MB
    with (
        tempfile.TemporaryDirectory(prefix="mmrouter-bench-", dir=TMPFS) as root,
        Pool(root, "bench", limit_bytes=limit) as pool,
        Child.module("bench.handover.reader_process", root) as reader,
    ):
        gc.collect()
        gc.disable()
        try:
            for number in range(-1, rounds):  # the first round warms up and compares the payloads
                into = times if number >= 0 else Times()
                expected = sums if number < 0 else []
                _floor(into, payloads, floors)
                _ours(into, payloads, pool, reader, expected)
                _peer(into, payloads, reader, expected)
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
        answer = reader.call("ours", sent=handle, summed=bool(expected))
        _require("ours", answer.get("sum"), expected[number] if expected else None)
        into.read.append(answer["seconds"])


def _peer(into: Times, payloads: list[bytes], reader: Child, expected: list[int]) -> None:
    segments = []
    for payload in payloads:
        began = time.perf_counter()
        segments.append(fresh_segment.send(payload))
        into.peer_write.append(time.perf_counter() - began)
    for number, (segment, size) in enumerate(segments):
        answer = reader.call("peer", sent={"name": segment.name, "size": size}, summed=bool(expected))
        _require("the fresh segment", answer.get("sum"), expected[number] if expected else None)
        into.peer_read.append(answer["seconds"])
        segment.close()
        segment.unlink()


def _require(way: str, actual: int | None, expected: int | None) -> None:
    if actual != expected:
        raise PayloadsDifferError(f"{way}: CRC-32 {actual} instead of {expected}")
