"""The reading process of ``bench/handover/handover.py``: JSON lines on standard input say what to read, and by which
way.

A payload is named by what the writer would send: our handle, or the peer's segment and its size. The time covers all
that a reader does from there until it could use the payload, and letting it go again; ``summed`` asks for a CRC-32 of
the payload too, outside the time.
"""

import gc
import json
import sys
import time
import zlib
from multiprocessing import resource_tracker, shared_memory
from typing import Any

from bench.handover import fresh_segment
from mmrouter_handover.shm import Reader, read_handle


def ours(reader: Reader, sent: dict[str, Any], summed: bool) -> dict[str, Any]:
    """Read by handle where it lies."""
    began = time.perf_counter()
    view = reader.open(read_handle(sent))
    opened = time.perf_counter()
    answer = {"sum": zlib.crc32(view.data)} if summed else {}
    resumed = time.perf_counter()
    view.release()
    return {**answer, "seconds": opened - began + time.perf_counter() - resumed}


def peer(sent: dict[str, Any], summed: bool) -> dict[str, Any]:
    """Attach, copy out, take apart."""
    began = time.perf_counter()
    segment = shared_memory.SharedMemory(sent["name"])
    assert segment.buf is not None
    raw = bytes(segment.buf[: sent["size"]])
    segment.close()
    _, payload = fresh_segment.parts(raw)
    seconds = time.perf_counter() - began
    resource_tracker.unregister(f"/{sent['name']}", "shared_memory")  # the writer removes it
    return {"seconds": seconds, **({"sum": zlib.crc32(payload)} if summed else {})}


def main() -> None:
    """Answer until the writer is done."""
    gc.disable()
    with Reader(sys.argv[1]) as reader:
        for line in sys.stdin:
            command = json.loads(line)
            sent, summed = command["sent"], command["summed"]
            answer = ours(reader, sent, summed) if command["do"] == "ours" else peer(sent, summed)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
