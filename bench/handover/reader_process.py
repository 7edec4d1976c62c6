"""The reading process of the hand-over benchmark: opens payloads by our handle or by the peer's segment, and times it.

The time covers everything from the received name to a usable payload, and its release. ``summed`` asks for a CRC-32 of
the payload too, outside the time.
"""

import asyncio
import gc
import sys
import time
import zlib
from multiprocessing import resource_tracker, shared_memory
from typing import Any

from bench.handover import fresh_segment
from bench.measured_process import serve
from mmrouter_handover.shm import Reader, read_handle


class PayloadReader:
    """The commands."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def ours(self, sent: dict[str, Any], summed: bool) -> dict[str, Any]:
        """Read a payload where it lies, by its handle."""
        began = time.perf_counter()
        view = self._reader.open(read_handle(sent))
        opened = time.perf_counter()
        answer = {"sum": zlib.crc32(view.data)} if summed else {}
        resumed = time.perf_counter()
        view.release()
        return {**answer, "seconds": opened - began + time.perf_counter() - resumed}

    async def peer(self, sent: dict[str, Any], summed: bool) -> dict[str, Any]:
        """Attach the peer's segment, copy it out, and take it apart."""
        began = time.perf_counter()
        segment = shared_memory.SharedMemory(sent["name"])
        assert segment.buf is not None
        raw = bytes(segment.buf[: sent["size"]])
        segment.close()
        _, payload = fresh_segment.parts(raw)
        seconds = time.perf_counter() - began
        resource_tracker.unregister(f"/{sent['name']}", "shared_memory")  # the writer removes it
        return {"seconds": seconds, **({"sum": zlib.crc32(payload)} if summed else {})}


if __name__ == "__main__":
    gc.disable()
    with Reader(sys.argv[1]) as reader:
        asyncio.run(serve(PayloadReader(reader)))
