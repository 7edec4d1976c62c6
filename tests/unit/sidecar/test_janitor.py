"""The janitor on a real tmpfs removes files of dead writers before the engine runs, and keeps files in use."""

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.sidecar.janitor_rig import ENCODERS, MIB, Node

from handover.tests.support import bytes_below, crash_pool
from mmrouter_handover.shm import PlainFiles, Pool
from mmrouter_sidecar.shared_memory import cleanup_rules
from mmrouter_sidecar.shared_memory import janitor as janitors
from mmrouter_sidecar.shared_memory.janitor import Janitor


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


async def test_a_scan_in_progress_at_the_end_leaves_no_mark(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
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
