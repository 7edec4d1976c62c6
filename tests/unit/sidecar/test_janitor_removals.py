"""Which embedding files and folders the janitor removes while engines run, by age and by need, on a real tmpfs."""

import os
from pathlib import Path
from typing import Any

import pytest
from unit.sidecar.janitor_rig import ENCODERS, MIB, Node

from mmrouter_sidecar.shared_memory import cleanup_rules
from mmrouter_sidecar.shared_memory import janitor as janitors
from mmrouter_sidecar.shared_memory.ages import Ages
from mmrouter_sidecar.shared_memory.embedding_files import clean


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


async def test_a_file_used_since_the_scan_is_not_removed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
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
