"""Plain files are whole or absent; ``reclaim`` removes files of dead writers, ``ledger`` accounts for every byte."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from handover.tests.support import bytes_below, crash_pool, outcome
from mmrouter_handover.shm import HandOverError, PlainFiles, Pool, Reader, ledger, reclaim
from mmrouter_handover.shm.files import clock as boot_clock
from mmrouter_handover.shm.slot_format import MAX_LEASE_SECONDS, PAGE_BYTES, slot_bytes

MIB = 1 << 20
PAGE = PAGE_BYTES


@pytest.fixture
def plains(root):
    with PlainFiles(root, "w", 8 * MIB) as plains:
        yield plains


def is_full(call):
    return outcome(call)[1] == "full"


def test_a_plain_file_contains_its_payload_only_and_is_removed_when_released(root):
    with PlainFiles(root, "router-1", MIB) as plains:
        for payload in (b"", b"\x89PNG", os.urandom(100_000), memoryview(bytearray(5000))):
            file = plains.put(payload, ".png")
            assert file.path.read_bytes() == bytes(payload)
            assert file.path.suffix == ".png"
            file.release()
            file.release()
            assert not file.path.exists()
        with plains.put(b"x") as file:
            assert file.path.is_absolute()
        assert not file.path.exists()
        assert plains.bytes == 0
    assert os.listdir(root) == []


def test_names_reveal_no_key_and_only_the_group_has_access(root):
    before = os.umask(0o077)
    try:
        with PlainFiles(root, "a router/of: ours", MIB) as plains, Pool(root, "a router/of: ours", MIB) as pool:
            files = [plains.put(b"secret", ".jpg", key="tenant 7: m1-aa").path for _ in range(2)]
            names = {file.name for file in files} | {plains.put(b"secret", ".jpg").path.name}
            assert not any("tenant" in name or "m1" in name for name in names)
            assert len({name.partition("-")[2].partition("-")[2] for name in names}) == 2
            for path, mode in ((files[0], 0o640), (root / pool.put(b"x", "r").handle.path, 0o660)):
                assert stat.S_IMODE(path.stat().st_mode) == mode
                assert stat.S_IMODE(path.parent.stat().st_mode) == 0o2770
                assert path.parent.name.startswith("pool-a_router_of_ours-")
    finally:
        os.umask(before)


def test_a_half_written_file_is_not_visible_under_its_final_name(root, plains, monkeypatch):
    """The ledger is read in the middle of the write."""
    seen = []
    real = os.write

    def slow(number, data):
        if len(data) > 1000:
            seen.append({entry.path: entry.state for entry in ledger(root, boot_clock()).entries})
            return real(number, data[:1000])
        return real(number, data)

    payload = os.urandom(5000)
    monkeypatch.setattr(os, "write", slow)
    file = plains.put(payload)
    path = f"{plains.name}/{file.path.name}"
    assert len(seen) == 4
    assert all(path not in states for states in seen)
    assert all(sorted(states.values()) == ["owner", "writing"] for states in seen)
    assert file.path.read_bytes() == payload


def test_requests_with_one_key_share_a_file_until_the_last_release(plains):
    one, two = (plains.put(b"image", ".png", key="identity") for _ in range(2))
    other = plains.put(b"image", ".webp", key="identity")
    assert one.path == two.path != other.path
    assert plains.bytes == 2 * PAGE
    one.release()
    two.release()
    assert plains.put(b"image", ".png", key="identity").path != one.path


@pytest.mark.parametrize(("kind", "unit"), [(PlainFiles, PAGE), (Pool, slot_bytes(1))])
def test_a_writer_above_its_high_water_mark_gets_full(root, kind, unit):
    with kind(root, "w", 10 * unit, high_water=0.5) as writer:
        lent = [writer.put(b"x", ".png") for _ in range(5)]
        assert is_full(lambda: writer.put(b"x", ".png"))
        assert is_full(lambda: writer.put(bytes(20 * unit), ".png"))
        lent[0].release()
        writer.put(b"x", ".png")
        assert writer.bytes == 5 * unit


def test_all_writers_of_a_root_share_one_bound_with_other_programs(root, clock):
    total = 40 * slot_bytes(1)
    bounds = {"total_bytes": total, "high_water": 0.5, "now": clock}
    with (
        PlainFiles(root, "one", total, **bounds) as one,
        PlainFiles(root, "two", total, **bounds) as two,
        Pool(root, "three", limit_bytes=2 * total, **bounds) as three,
    ):
        mine = one.put(bytes(total // 4))
        assert is_full(lambda: two.put(bytes(total // 4)))
        clock.now += 1  # one count of all files is valid for a second
        (root / "stranger").write_bytes(bytes(total // 4 - 2 * slot_bytes(1)))
        three.put(b"x", "r")
        assert is_full(lambda: three.put(bytes(total // 4), "r"))
        assert is_full(lambda: two.put(bytes(total // 4)))
        mine.release()
        clock.now += 1
        assert two.put(bytes(total // 4)).path.exists()
        clock.now += 1
        assert is_full(lambda: one.put(bytes(total // 4)))


def test_a_failed_write_is_full_and_leaves_nothing(plains, monkeypatch):
    monkeypatch.setattr(os, "write", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(HandOverError, match="No space left") as error:
        plains.put(b"x")
    assert error.value.reason == "full"
    assert os.listdir(plains.folder) == ["owner"]
    assert plains.bytes == 0


@pytest.mark.parametrize("wrong", [{"suffix": "/../x"}, {"suffix": "png"}, {"seconds": 0}, {"seconds": 3601}])
def test_an_invalid_suffix_or_time_is_refused(plains, wrong):
    with pytest.raises(ValueError, match="no file"):
        plains.put(b"x", **wrong)
    assert os.listdir(plains.folder) == ["owner"]


def test_the_ledger_lists_plain_files(root, clock):
    clock.now = 5000.5
    plains = PlainFiles(root, "router a", MIB, now=clock)
    file = plains.put(bytes(5000), ".png", seconds=10)
    (plains.folder / "plain-zz").mkdir()
    (plains.folder / "draft-plain-1388-1").write_bytes(b"half")
    clock.now += 100
    entries = {entry.path.rpartition("/")[2]: entry for entry in ledger(root, clock.now).entries}
    entry = entries[file.path.name]
    assert (entry.state, entry.writer, entry.lives, entry.bytes) == ("leased", "router a", True, 2 * PAGE)
    assert (entry.since, entry.deadline) == (5000.5, 5010.5)
    assert (entries["draft-plain-1388-1"].state, entries["draft-plain-1388-1"].since) == ("writing", 5.0)
    assert ledger(root, clock.now).bytes == bytes_below(root)
    plains.abandon()
    states = {entry.state for entry in ledger(root, clock.now).entries if entry.path.endswith(".png")}
    assert states == {"expired"}


def test_a_deadline_beyond_the_longest_lease_protects_nothing(root, clock):
    plains = PlainFiles(root, "w", MIB, now=clock)
    files = [plains.put(b"x"), plains.put(b"y")]
    for file, seconds in zip(files, (MAX_LEASE_SECONDS, MAX_LEASE_SECONDS + 2), strict=True):
        os.utime(file.path, (0, clock.now + seconds))
    plains.abandon()
    assert (reclaim(root, clock.now).kept, [file.path.exists() for file in files]) == (1, [True, False])


def test_concurrent_writes_have_files_of_their_own_and_are_counted(plains):
    payloads = [bytes([number]) * 50_000 for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        files = list(threads.map(plains.put, payloads))
    assert [file.path.read_bytes() for file in files] == payloads
    assert plains.bytes == bytes_below(plains.folder) - PAGE  # its owner file
    for file in files:
        file.release()
    assert plains.bytes == 0


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def test_the_ledger_lists_every_byte_and_files_of_other_programs_are_never_removed(root, clock):
    pool, reader = Pool(root, "router a", limit_bytes=4 << 20, now=clock), Reader(root)
    leases = [pool.put(bytes([n]) * 70_000, "r", seconds=5 + n) for n in range(4)]
    reader.open(leases[1].handle).release()
    leases[2].release()
    pool.lease(10)
    clock.now += 5.5
    files = {"stranger": 5000, "folder/inside": 5000, "pool-x-1/slot-1": 100, "pool-x-1/notes": 1, "pool-file": 1}
    fill(root, {path: bytes(length) for path, length in files.items()})
    (root / "pool-link").symlink_to("pool-x-1")
    found = ledger(root, clock.now)
    assert found.bytes == bytes_below(root)
    entries = {entry.path: entry for entry in found.entries}
    assert [entries[lease.handle.path].state for lease in leases] == ["expired", "acknowledged", "released", "leased"]
    first = entries[leases[0].handle.path]
    assert (first.writer, first.lives, first.since, first.deadline) == ("router a", True, 1000.0, 1005.0)
    assert first.bytes == slot_bytes(70_000)
    states = sorted(entry.state for entry in found.entries if entry.path.startswith(pool.name))
    assert states == ["acknowledged", "expired", "leased", "owner", "released", "writing"]
    assert entries["pool-x-1/slot-1"].state == "unreadable"
    others = {"stranger", "folder/inside", "pool-x-1/notes", "pool-file", "pool-link"}
    assert {path for path, entry in entries.items() if entry.state == "other"} == others
    os.utime(root / "stranger", (2e9, 1e9))
    os.utime(root / "folder" / "inside", (1e9, 3e9))
    used = {entry.path: entry.used for entry in ledger(root, clock.now).entries}
    assert (used["stranger"], used["folder/inside"]) == ((2e9, 1e9), (1e9, 3e9))
    assert used[leases[0].handle.path] is None
    assert 0 <= found.pressure <= 1
    crash_pool(pool)
    assert not any(entry.lives for entry in ledger(root, clock.now).entries)
    clock.now += 100
    assert reclaim(root, clock.now).pools == 1
    assert {entry.path for entry in ledger(root, clock.now).entries} == others
    reader.close()


def test_what_writers_that_were_killed_at_work_half_wrote_is_removed(root, clock):
    (root / "pool-a-1").mkdir()
    slots = {"slot-1": b"", "slot-2": bytes(3 * PAGE_BYTES)}
    fill(root / "pool-b-1", {"owner": b'{"wri', "draft-plain-1-1": b"half", **slots})
    assert reclaim(root, clock.now).pools == 2
    assert os.listdir(root) == []


def test_a_pool_under_construction_is_not_reclaimed(root, clock, monkeypatch):
    """The janitor runs between the system calls of the construction."""
    calls = []
    real = os.open

    def interrupted(path, *arguments, **options):
        if path in ("owner",) or str(path).startswith("pool-"):
            monkeypatch.setattr(os, "open", real)
            calls.append(reclaim(root, clock.now).pools)
            monkeypatch.setattr(os, "open", interrupted)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", interrupted)
    pool = Pool(root, "w", limit_bytes=1 << 20, now=clock)
    monkeypatch.setattr(os, "open", real)
    assert calls == [0, 0]
    assert pool.put(b"x", "r").handle.path.startswith(pool.name)
    pool.close()


def test_slots_of_an_unknown_version_are_kept_for_the_longest_lease(root, clock):
    pool = Pool(root, "w", limit_bytes=1 << 20, now=clock)
    path = root / pool.put(b"x", "r", seconds=1).handle.path
    crash_pool(pool)
    with path.open("r+b") as file:
        file.seek(7)
        file.write(b"\x09")
    clock.now += 10
    assert reclaim(root, clock.now).kept == 1
    old = path.stat().st_mtime - MAX_LEASE_SECONDS - 1
    os.utime(path, (old, old))
    assert reclaim(root, clock.now).slots == 1
    assert os.listdir(root) == []
