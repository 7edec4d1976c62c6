"""The janitor on a real tmpfs removes files of dead writers before the engine runs, and keeps files in use."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from handover.tests.support import bytes_below, crash_pool, shared_root
from mmrouter_handover.shm import PlainFiles, Pool
from mmrouter_handover.shm.files import clock
from mmrouter_lib import feed
from mmrouter_sidecar.metrics import HotPathCounts, Metrics
from mmrouter_sidecar.settings import Settings
from mmrouter_sidecar.shared_memory import cleanup_rules
from mmrouter_sidecar.shared_memory import janitor as janitors
from mmrouter_sidecar.shared_memory.ages import Ages
from mmrouter_sidecar.shared_memory.embedding_files import clean
from mmrouter_sidecar.shared_memory.janitor import Janitor

MIB = 1 << 20
ENCODERS = "m1-aa/encoder_cache.safetensors"


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_root() as folder:
        yield folder


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
def node(settings: Settings, shared: Path) -> Node:
    return Node(settings, shared)


def test_of_a_volume_only_unused_embeddings_are_removed(node: Node) -> None:
    node.crashed()
    others = set(bytes_of(node.folder))
    old, recent = node.encoded("m1-aa", unused=cleanup_rules.FORGOTTEN_SECONDS + 1), node.encoded("m1-bb", unused=100)
    assert clean(node.folder, 0, Ages(), Ages()) == 1
    assert (old.exists(), recent.exists()) == (False, True)
    assert clean(node.folder, 1, Ages(), Ages()) == 1
    assert set(bytes_of(node.folder)) == others


def test_a_file_that_cannot_be_removed_from_a_volume_keeps_no_other_one_and_folders_that_stay_empty_go(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused, unlink = cleanup_rules.FORGOTTEN_SECONDS + 1, Path.unlink
    kept, removed = node.encoded("m1-aa", unused=unused + 1), node.encoded("m1-bb", unused=unused)

    def refuses(path: Path) -> None:
        if path == kept:
            raise PermissionError(path)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", refuses)
    with pytest.raises(PermissionError):
        clean(node.folder, 0, Ages(), Ages())
    assert (kept.exists(), removed.exists(), removed.parent.exists()) == (True, False, True)
    os.utime(removed.parent, (0, 0))
    with pytest.raises(PermissionError):
        clean(node.folder, 0, Ages(), Ages())
    assert (kept.exists(), removed.parent.exists()) == (True, False)


def bytes_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_files_of_the_last_pod_are_cleared_before_the_next_engine_runs(node: Node) -> None:
    node.crashed()
    node.encoded("m1-aa")
    (node.folder / "core.1234").write_bytes(bytes(MIB))
    living = PlainFiles(node.folder, "router", MIB)
    file = living.put(b"mine")
    await node.begin()
    assert sorted(os.listdir(node.folder)) == sorted([living.name, "sidecar-pod-1"])
    assert file.path.read_bytes() == b"mine"
    assert (node.removed("dead_writer"), node.removed("left_behind")) == (3, 2)
    assert node.removed("left_behind", "_bytes") == MIB + 2 * 4096
    assert node.reports[-1].taken == bytes_below(node.folder)
    living.close()


async def test_with_another_pod_present_leases_and_other_files_stay(node: Node) -> None:
    await node.begin("pod-2")
    node.crashed()
    node.encoded("m1-aa")
    one = await node.begin()
    assert (node.removed("dead_writer"), node.removed("left_behind")) == (1, 0)  # the half file
    assert (node.folder / ENCODERS).exists()
    node.ahead = 61
    await one.begin()
    assert node.removed("dead_writer") == 3
    assert sorted(os.listdir(node.folder)) == ["m1-aa", "sidecar-pod-1", "sidecar-pod-2"]


async def test_a_killed_pod_counts_as_present_for_the_time_of_a_restart(node: Node) -> None:
    await node.begin("pod-2")
    node.encoded("m1-aa")
    node.ahead = cleanup_rules.PRESENT_SECONDS - 10
    await node.begin()
    assert (node.folder / ENCODERS).exists()
    node.ahead = 2 * cleanup_rules.PRESENT_SECONDS
    await node.begin("pod-3")
    assert os.listdir(node.folder) == ["sidecar-pod-3"]


async def test_a_restarted_sidecar_keeps_the_files_of_its_running_engine(node: Node) -> None:
    node.encoded("m1-aa")
    server = await asyncio.start_server(lambda *_: None, node.settings.pod_ip, 0)
    port = server.sockets[0].getsockname()[1]
    ports = replace(node.settings.ports, engine=port)
    first = await node.begin(ports=ports)
    await first.end()
    assert (node.folder / ENCODERS).exists()
    server.close()
    await server.wait_closed()
    await node.begin(ports=ports)
    assert not (node.folder / ENCODERS).exists()


async def test_the_last_pod_of_a_node_clears_everything_and_others_do_not(node: Node) -> None:
    one, two = await node.begin("pod-1"), await node.begin("pod-2")
    node.crashed()
    node.encoded("m1-aa")
    await one.end()
    assert (node.folder / ENCODERS).exists()
    assert len([name for name in os.listdir(node.folder) if name.startswith("pool-")]) == 2
    assert "sidecar-pod-1" not in os.listdir(node.folder)
    await two.end()
    assert os.listdir(node.folder) == []


async def test_ascan_in_progress_at_the_end_leaves_no_mark(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is cancelled, the thread is not."""
    one = await node.begin()
    looking, end = threading.Event(), threading.Event()
    real = Janitor.scan

    def slow(self: Janitor) -> None:
        looking.set()
        assert end.wait(60)
        real(self)

    monkeypatch.setattr(Janitor, "scan", slow)
    task = asyncio.create_task(one.run())
    await asyncio.to_thread(looking.wait, 60)
    task.cancel()
    ending = asyncio.create_task(one.end())
    await asyncio.sleep(0)
    end.set()
    await ending
    assert os.listdir(node.folder) == []
    late = node.janitor()
    await late.end()
    await late.begin()  # whatever comes after the end does nothing
    assert os.listdir(node.folder) == []


async def test_links_out_of_the_directory_are_not_followed(node: Node, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / cleanup_rules.ENCODER_FILE).write_bytes(b"x")
    os.utime(outside / cleanup_rules.ENCODER_FILE, (0, 0))
    (node.folder / "link").symlink_to(outside)
    (node.folder / "folder").mkdir()
    (node.folder / "folder" / "link").symlink_to(outside)
    await node.begin("pod-2")
    one = await node.begin()
    await node.janitor("pod-2").end()
    await one.end()
    assert os.listdir(node.folder) == []
    assert (outside / cleanup_rules.ENCODER_FILE).exists()


async def test_least_recently_read_encoder_files_are_removed_first(node: Node) -> None:
    await node.begin("pod-2")
    for number in range(6):
        node.encoded(f"m1-{number}", MIB, unused=600 - number)
    young = node.encoded("m1-young", MIB)
    read = node.folder / "m1-0" / cleanup_rules.ENCODER_FILE
    one = node.janitor(shared_bytes=8 * MIB)
    assert read.read_bytes()
    await one.begin()
    assert (node.reports[-1].above, node.reports[-1].limit) == (False, 8 * MIB)
    left = sorted(path.name for path in node.folder.glob("m1-*") if any(path.iterdir()))
    assert left == ["m1-0", "m1-3", "m1-4", "m1-5", "m1-young"]
    assert young.exists()
    assert (node.removed("pressure"), node.removed("pressure", "_bytes")) == (2, 2 * MIB)


def clock_of_files(folder: Path) -> int:
    """Return the time of a file that is written now, ns since 1970: it moves on in steps of some milliseconds."""
    probe = folder / "probe"
    probe.write_bytes(b"x")
    return probe.stat().st_mtime_ns


async def test_every_read_of_an_encoder_file_is_recorded(node: Node, tmp_path: Path) -> None:
    """relatime notes a reading only where the file was changed since the last one that it noted."""
    await node.begin("pod-2")
    path = node.encoded("m1-aa", unused=30)
    one = node.janitor()
    seen = []
    for _ in range(3):
        while clock_of_files(tmp_path) <= path.stat().st_atime_ns:
            pass  # a reading in the same step as the one before would show nothing new
        assert path.read_bytes()
        seen.append(path.stat().st_atime_ns)
        await one.begin()
        assert path.stat().st_atime_ns == seen[-1]
    assert seen == sorted(set(seen))


async def test_a_file_used_since_thescan_is_not_removed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.begin("pod-2")
    path = node.encoded("m1-aa", unused=2 * cleanup_rules.FORGOTTEN_SECONDS)
    real = cleanup_rules.removals

    def used_meanwhile(*arguments: Any) -> list[cleanup_rules.Removal]:
        found = real(*arguments)
        assert len(found) == 1
        assert path.read_bytes()
        return found

    monkeypatch.setattr(cleanup_rules, "removals", used_meanwhile)
    await node.begin()
    assert path.exists()
    monkeypatch.setattr(cleanup_rules, "removals", real)
    os.utime(path, (0, 0))
    await node.begin()
    assert (path.exists(), node.removed("unused")) == (False, 1)


async def test_only_folders_that_were_empty_for_long_are_removed(node: Node) -> None:
    await node.begin("pod-2")
    for name, age in (("m1-young", 10), ("m1-old", cleanup_rules.FORGOTTEN_SECONDS + 1), ("m1-full", 1e6)):
        folder = node.folder / "deep" / name
        folder.mkdir(parents=True)
        if name == "m1-full":
            (folder / "file").write_bytes(b"x")
        now = folder.stat().st_mtime
        os.utime(folder, (now - age, now - age))
    await node.begin()
    assert sorted(path.name for path in (node.folder / "deep").iterdir()) == ["m1-full", "m1-young"]


async def test_metrics_have_bytes_by_state_and_the_pressure(node: Node) -> None:
    await node.begin("pod-2")
    pool = Pool(node.folder, "w", limit_bytes=8 * MIB)
    pool.put(b"x", "r")
    node.encoded("m1-aa")
    await node.begin()
    assert node.metric("shm_bytes", state="leased") == 65536 + 4096
    assert node.metric("shm_bytes", state="encoder") == 8192
    assert node.metric("shm_pressure_ratio") >= bytes_below(node.folder) / (64 * MIB) > 0
    figures = node.reports[-1]
    assert (figures.taken, figures.limit, figures.above) == (bytes_below(node.folder), 64 * MIB, False)
    assert figures.capacity >= figures.available > 0
    pool.close()


async def test_an_unusable_directory_is_counted_and_the_sidecar_runs_on(node: Node, start: Any) -> None:
    gone = node.folder / "not there"
    one = await node.begin(shared_dir=gone)
    await one.end()
    assert (node.metric("shm_errors_total"), node.reports) == (2, [])
    running = await start(replace(node.settings, shared_dir=gone))
    assert running.metric("shm_errors_total") >= 1


async def test_two_concurrent_janitors_do_not_conflict(node: Node) -> None:
    for _ in range(5):
        node.crashed()
    for number in range(20):
        node.encoded(f"m1-{number}", unused=10_000)
    both = [node.janitor("pod-1"), node.janitor("pod-2")]
    for one in both:
        one.touch()
    await asyncio.gather(*(one.begin() for one in both))
    assert node.removed("dead_writer") == 5
    assert node.removed("unused") == 20
    assert node.metric("shm_errors_total") == 0


async def test_pods_that_start_together_keep_each_others_marks(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.encoded("m1-aa")
    one, two = node.janitor("pod-1"), node.janitor("pod-2")
    real = one.clear_all

    def meanwhile() -> None:
        two.touch()
        real()

    monkeypatch.setattr(one, "clear_all", meanwhile)
    await one.begin()
    assert sorted(os.listdir(node.folder)) == ["sidecar-pod-1", "sidecar-pod-2"]


async def test_a_sidecar_clears_before_it_is_ready_and_reports_usage_to_routers(
    node: Node, start: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PERIOD", "SCAN_PERIOD"):
        monkeypatch.setattr(janitors, name, 0.02)
    monkeypatch.setattr(janitors, "CPU_SHARE", 10.0)
    node.crashed()
    node.encoded("m1-aa")
    at_serving: list[list[str]] = []
    real: Callable[..., Any] = janitors.Janitor.run

    def observed(self: Janitor) -> Any:
        at_serving.append(os.listdir(node.folder))
        return real(self)

    monkeypatch.setattr(janitors.Janitor, "run", observed)
    one = await start(node.settings)
    assert at_serving == [["sidecar-pod-1"]]
    beat = await router.heartbeat(lambda beat: beat.shared is not None)
    assert (beat.shared.taken, beat.shared.limit, beat.shared.above) == (0, 64 * MIB, False)
    pool = Pool(node.folder, "w", limit_bytes=60 * MIB, high_water=1.0)
    leases = [pool.lease(MIB) for _ in range(55)]
    await router.heartbeat(lambda beat: beat.shared.above)
    crash_pool(pool, leases)
    beat = await router.heartbeat(lambda beat: not beat.shared.above)
    assert beat.shared.taken < 0.7 * 64 * MIB
    await router.heartbeat(lambda beat: beat.shared.taken == 0)
    assert os.listdir(node.folder) == ["sidecar-pod-1"]
    assert one.metric("shm_reclaimed_total", reason="dead_writer") >= 55
    node.encoded("m1-bb")
    await one.stop()
    assert os.listdir(node.folder) == []


async def test_a_wall_clock_that_is_set_changes_no_age(node: Node) -> None:
    await node.begin("pod-2")
    one = await node.begin()
    node.encoded("m1-aa")
    empty = node.folder / "m1-bb"
    empty.mkdir()
    one.scan()
    node.step = cleanup_rules.FORGOTTEN_SECONDS + 1  # forward
    node.encoded("m1-cc")  # used since the scan before, by a clock of whatever time
    node.ahead += janitors.FOLDER_PERIOD
    one.scan()
    assert (node.folder / ENCODERS).exists()
    assert (node.folder / "m1-cc" / cleanup_rules.ENCODER_FILE).exists()
    assert empty.exists()
    node.step = -node.step  # back
    node.ahead += cleanup_rules.FORGOTTEN_SECONDS - 1
    read = (node.folder / "m1-cc" / cleanup_rules.ENCODER_FILE).stat()
    os.utime(node.folder / "m1-cc" / cleanup_rules.ENCODER_FILE, (read.st_atime + node.step, read.st_mtime))
    one.scan()
    assert not (node.folder / ENCODERS).exists()
    assert (node.folder / "m1-cc" / cleanup_rules.ENCODER_FILE).exists()  # its read is earlier than its writing
    assert node.removed("unused") == 1
