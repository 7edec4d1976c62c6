"""One node's shared directory on a real tmpfs, and the janitors of its pods."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from handover.tests.support import crash_pool, shared_root
from mmrouter_handover.shm import PlainFiles, Pool
from mmrouter_handover.shm.files import clock
from mmrouter_lib import feed
from mmrouter_sidecar.metrics import HotPathCounts, Metrics
from mmrouter_sidecar.settings import Settings
from mmrouter_sidecar.shared_memory import cleanup_rules
from mmrouter_sidecar.shared_memory.janitor import Janitor

MIB = 1 << 20
ENCODERS = "m1-aa/encoder_cache.safetensors"


class Node:
    """One node's directory, and the janitors of its pods."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.folder = folder
        self.settings = replace(settings, shared_dir=folder, shared_bytes=64 * MIB)
        self.ahead = self.step = 0.0  # of the node's clock since its boot, and of its wall clock beside that
        self.reports: list[feed.SharedDirectory] = []
        self.metrics = Metrics()
        self.metrics.watch(lambda: HotPathCounts(0, {}, 0, 0))

    def janitor(self, uid: str = "pod-1", **changes: Any) -> Janitor:
        settings = replace(self.settings, pod_uid=uid, **changes)
        return Janitor(
            settings,
            self.metrics,
            self.reports.append,
            now=lambda: clock() + self.ahead,
            wall=lambda: time.time() + self.ahead + self.step,
        )

    async def begin(self, uid: str = "pod-1", **changes: Any) -> Janitor:
        janitor = self.janitor(uid, **changes)
        await janitor.begin()
        return janitor

    def removed(self, reason: str, what: str = "") -> float:
        return self.metric(f"shm_reclaimed{what}_total", reason=reason)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"mmrouter_sidecar_{name}", labels) or 0.0

    def encoded(self, name: str, size: int = 5000, unused: float = 0.0) -> Path:
        path = self.folder / name / cleanup_rules.ENCODER_FILE
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(size))
        status = path.stat()
        os.utime(path, (status.st_atime - unused, status.st_mtime - unused))
        return path

    def crashed(self) -> None:
        """What two writers leave that are killed: leases that are not over, a plain file, half of one."""
        pool, plains = Pool(self.folder, "w", limit_bytes=8 * MIB), PlainFiles(self.folder, "r", 8 * MIB)
        pool.put(b"x", "r")
        plains.put(b"y", ".png")
        (plains.folder / "draft-plain-1-1").write_bytes(b"half")
        crash_pool(pool)
        plains.abandon()


@pytest.fixture
def node(settings: Settings) -> Iterator[Node]:
    with shared_root() as folder:
        yield Node(settings, folder)
