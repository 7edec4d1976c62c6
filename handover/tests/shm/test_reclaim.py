"""``reclaim`` removes the files of dead writers only; ``ledger`` accounts for every byte."""

import os

import msgspec
import pytest

from handover.tests.support import bytes_below, crash_pool
from mmrouter_handover.shm import HandOverError, Pool, Reader, ledger, reclaim
from mmrouter_handover.shm.slot_format import MAX_LEASE_SECONDS, PAGE_BYTES, slot_bytes

MIB = 1 << 20


def states(root, clock):
    return {entry.path: entry.state for entry in ledger(root, clock.now).entries}


def test_a_living_writer_keeps_even_expired_slots(root, clock):
    with Pool(root, "w", limit_bytes=MIB, now=clock) as pool, Reader(root) as reader:
        handle = pool.put(b"x", "r", seconds=1).handle
        clock.now += 1000
        before = bytes_below(root)
        assert reclaim(root, clock.now).slots == 0
        assert bytes_below(root) == before
        with reader.open(handle) as view:
            assert bytes(view.data) == b"x"


def test_slots_of_a_dead_writer_last_until_deadline_and_last_reader(root, clock):
    pool, reader = Pool(root, "w", limit_bytes=MIB, now=clock), Reader(root)
    short, long, acknowledged = (pool.put(name, "r", seconds=s) for name, s in ((b"s", 5), (b"l", 50), (b"a", 50)))
    pool.lease(7)  # never published
    reader.open(acknowledged.handle).release()
    crash_pool(pool)
    view = reader.open(short.handle)
    first = reclaim(root, clock.now)
    assert (first.slots, first.kept, first.pools) == (2, 2, 0)
    clock.now += 6
    assert reclaim(root, clock.now).slots == 0
    assert bytes(view.data) == b"s"
    view.release()
    assert reclaim(root, clock.now).slots == 1
    with reader.open(long.handle) as view:
        assert bytes(view.data) == b"l"
    assert reclaim(root, clock.now).pools == 1
    assert bytes_below(root) == 0
    assert os.listdir(root) == []
    reader.close()


def test_the_ledger_lists_every_byte_with_its_writer_and_state(root, clock):
    pool, reader = Pool(root, "router a", limit_bytes=4 * MIB, now=clock), Reader(root)
    leases = [pool.put(bytes([n]) * 70_000, "r", seconds=5 + n) for n in range(4)]
    reader.open(leases[1].handle).release()
    leases[2].release()
    pool.lease(10)
    clock.now += 5.5
    (root / "stranger").write_bytes(bytes(5000))
    (root / "folder").mkdir()
    (root / "folder" / "inside").write_bytes(bytes(5000))
    (root / "pool-x-1").mkdir()
    (root / "pool-x-1" / "slot-1").write_bytes(bytes(100))
    (root / "pool-x-1" / "notes").write_bytes(b"n")
    (root / "pool-file").write_bytes(b"n")
    (root / "pool-dangling").symlink_to("nowhere")
    found = ledger(root, clock.now)
    assert found.bytes == bytes_below(root)
    entries = {entry.path: entry for entry in found.entries}
    assert [entries[lease.handle.path].state for lease in leases] == ["expired", "acknowledged", "released", "leased"]
    first = entries[leases[0].handle.path]
    assert (first.writer, first.lives, first.since, first.deadline) == ("router a", True, 1000.0, 1005.0)
    assert first.bytes == slot_bytes(70_000)
    assert sorted(entry.state for entry in found.entries if entry.path.startswith(pool.name)) == sorted(
        ["owner", "expired", "acknowledged", "released", "leased", "writing"]
    )
    assert entries["pool-x-1/slot-1"].state == "unreadable"
    assert {path for path, entry in entries.items() if entry.state == "other"} == {
        "stranger", "folder/inside", "pool-x-1/notes", "pool-file", "pool-dangling",
    }  # fmt: skip
    os.utime(root / "stranger", (2e9, 1e9))
    os.utime(root / "folder" / "inside", (1e9, 3e9))
    used = {entry.path: entry.used for entry in ledger(root, clock.now).entries}
    assert (used["stranger"], used["folder/inside"], used[leases[0].handle.path]) == (2e9, 3e9, None)
    assert 0 <= found.pressure <= 1
    crash_pool(pool)
    assert not ledger(root, clock.now).entries[-1].lives
    reader.close()


def test_files_of_other_programs_are_never_removed(root, clock):
    (root / "stranger").write_bytes(b"x")
    (root / "pool-x-1").mkdir()
    (root / "pool-x-1" / "notes").write_bytes(b"n")
    (root / "pool-file").write_bytes(b"n")
    (root / "pool-link").symlink_to(root / "pool-x-1")
    before = sorted(root.rglob("*"))
    assert reclaim(root, clock.now).pools == 0
    assert sorted(root.rglob("*")) == before


def test_folders_of_writers_killed_during_creation_are_removed(root, clock):
    (root / "pool-a-1").mkdir()
    (root / "pool-b-1").mkdir()
    (root / "pool-b-1" / "owner").write_bytes(b'{"wri')
    (root / "pool-b-1" / "slot-1").write_bytes(b"")
    (root / "pool-b-1" / "slot-2").write_bytes(bytes(3 * PAGE_BYTES))
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
    pool = Pool(root, "w", limit_bytes=MIB, now=clock)
    monkeypatch.setattr(os, "open", real)
    assert calls == [0, 0]
    assert pool.put(b"x", "r").handle.path.startswith(pool.name)
    pool.close()


def test_slots_of_an_unknown_version_are_kept_for_the_longest_lease(root, clock):
    pool = Pool(root, "w", limit_bytes=MIB, now=clock)
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


def test_a_header_from_the_future_does_not_keep_its_bytes(root, clock):
    pool = Pool(root, "w", limit_bytes=MIB, now=lambda: clock.now + 1e6)
    pool.put(b"x", "r")
    crash_pool(pool)
    assert reclaim(root, clock.now).slots == 1


def test_a_second_janitor_finds_nothing_left(root, clock):
    pool = Pool(root, "w", limit_bytes=MIB, now=clock)
    pool.put(b"x", "r", seconds=1)
    crash_pool(pool)
    clock.now += 2
    total = reclaim(root, clock.now) + reclaim(root, clock.now)
    assert (total.slots, total.pools) == (1, 1)
    assert msgspec.to_builtins(total)["kept"] == 0


def test_a_reclaimed_slot_is_gone_for_a_reader_that_has_it_mapped(root, clock):
    pool, reader = Pool(root, "w", limit_bytes=MIB, now=clock), Reader(root)
    handle = pool.put(b"x", "r", seconds=1).handle
    reader.open(handle).release()
    crash_pool(pool)
    assert reclaim(root, clock.now).slots == 1
    for each in (reader, Reader(root)):
        with each, pytest.raises(HandOverError, match="gone"):
            each.open(handle)
