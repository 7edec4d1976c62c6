"""Images as files in the folder that the pods of a node share."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Final

from mmrouter_handover.shm import HandOverError, PlainFile, PlainFiles
from mmrouter_lib.engines.vllm.adapter import MIME_SUFFIXES
from mmrouter_router.core.linear_cost import Line
from mmrouter_router.handover.ways import Raw
from mmrouter_router.media.content import Media
from mmrouter_router.request.prepared import Outgoing, OutgoingImage

IN_THREAD = 256 * 1024  # bytes from which a file is written by a thread: allocating the pages of a tmpfs takes time
SIZES: Final = (64 << 10, 2 << 20)
ROUNDS: Final = 5
ORPHAN_SECONDS: Final = 1.0  # how long a file outlives a killed router: the requests that name it ended with the router


class SharedFolder:
    """This router's files below the root."""

    def __init__(self, root: Path, writer: str, limit_bytes: int, total_bytes: int) -> None:
        """``limit_bytes``: of this router's files, ``total_bytes``: of all writers' files. Raises ``OSError``."""
        self._plains = PlainFiles(root, writer, limit_bytes, total_bytes=total_bytes)

    async def put(self, name: str, media: Media) -> PlainFile:
        """Write an image, or share the file that already has its name. Raises :class:`HandOverError`."""
        if len(media.data) < IN_THREAD:
            return self._put(name, media)
        writing = asyncio.get_running_loop().run_in_executor(None, self._put, name, media)
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(_release)  # the thread still completes, and its file needs an owner
            raise

    def measured(self) -> Mapping[Raw, Line]:
        """Measure the writing of files and bodies, 30 ms at the router's start; empty where the folder is full."""
        try:
            (small, fast), (large, slow) = [(size, self._measure(bytes(size))) for size in SIZES]
        except HandOverError:
            return {}
        lines: dict[Raw, Line] = {}
        ways: tuple[Raw, Raw] = ("file", "bytes")
        for number, way in enumerate(ways):
            per_byte = max(0.0, slow[number] - fast[number]) / (large - small)
            lines[way] = Line(max(0.0, fast[number] - small * per_byte), per_byte)
        return lines

    def close(self) -> None:
        """Stop writing; files in use stay until their deadlines."""
        self._plains.close()

    def _put(self, name: str, media: Media) -> PlainFile:
        suffix = MIME_SUFFIXES.get(media.mime, "")
        return self._plains.put(media.data, suffix, key=name, seconds=ORPHAN_SECONDS)

    def _measure(self, data: bytes) -> tuple[float, float]:
        media = Media(data, "image/png", "data")
        files, bodies = [], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            self._put("", media).release()
            wrote = time.perf_counter()
            part = {"type": "image_url", "image_url": {"url": ""}}
            fields = {"messages": [{"role": "user", "content": [part]}]}
            Outgoing("", fields, (OutgoingImage(0, 0, "", media),)).body(fields)
            files.append(wrote - began)
            bodies.append(time.perf_counter() - wrote)
        return median(files), median(bodies)


def _release(writing: "asyncio.Future[PlainFile]") -> None:
    if not writing.cancelled() and writing.exception() is None:
        writing.result().release()
