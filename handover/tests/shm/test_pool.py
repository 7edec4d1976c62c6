"""Pools and readers in one process; flock(2) locks belong to open files, so they work here as between processes."""

import json
import os
import time
import weakref

import pytest

from handover.tests.support import bytes_below, crash_pool, trim
from mmrouter_handover.shm import Handle, HandOverError, Pool, Reader, read_handle, reclaim
from mmrouter_handover.shm import pool as pool_module
from mmrouter_handover.shm.slot_format import PAGE_BYTES, slot_bytes

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def pool(root):
    with Pool(root, "writer", limit_bytes=32 * MIB) as pool:
        yield pool


@pytest.fixture
def reader(root):
    with Reader(root) as reader:
        yield reader


def why(reader: Reader, handle: Handle) -> str:
    with pytest.raises(HandOverError) as error:
        reader.open(handle)
    return error.value.reason


def read(reader: Reader, handle: Handle) -> bytes:
    with reader.open(handle) as view:
        return bytes(view.data)


def test_a_payload_arrives_unchanged_and_its_slot_is_reused(root):
    with Pool(root, "writer", limit_bytes=MIB) as pool, Reader(root) as reader:
        paths = set()
        for size in (0, 1, 7, 65536, 65537, 100_000, 131_072) * 3:
            payload = os.urandom(size)
            handle = read_handle(json.dumps(pool.put(payload, "again").handle.to_json()))
            assert read(reader, handle) == payload
            paths.add(handle.path)
        assert len(paths) == 2  # one slot of each of two classes
        assert pool.bytes == slot_bytes(65536) + slot_bytes(131_072)
    assert os.listdir(root) == []


def test_a_view_is_a_read_only_window_on_the_slot(root, pool, reader):
    handle = pool.put(bytes(range(48)), "again").handle
    with reader.open(handle) as view:
        assert view.data.readonly
        number = os.open(root / handle.path, os.O_RDWR)
        os.pwrite(number, b"\xff", PAGE_BYTES)
        os.close(number)
        assert view.data[0] == 0xFF


def test_a_slot_is_reused_once_acknowledged_released_or_expired(root, clock):
    """That it is not reused before, the state machine proves."""
    with Pool(root, "writer", limit_bytes=4 * MIB, now=clock) as pool, Reader(root) as reader:
        acknowledged, released, expired = (pool.put(b"a", "r", seconds=5) for _ in range(3))
        read(reader, acknowledged.handle)
        assert pool.put(b"d", "r").handle.path == acknowledged.handle.path
        released.release()
        assert pool.put(b"e", "r").handle.path == released.handle.path
        clock.now += 5
        assert pool.put(b"g", "r").handle.path == expired.handle.path
        assert {why(reader, lease.handle) for lease in (acknowledged, released, expired)} == {"stale"}


def test_a_view_with_a_live_slice_is_not_released(pool, reader):
    lease = pool.put(b"x" * 1000, "r")
    view = reader.open(lease.handle)
    part = view.data[10:20]
    with pytest.raises(BufferError):
        view.release()
    lease.release()
    assert pool.put(b"y" * 1000, "r").handle.path != lease.handle.path
    assert bytes(part) == b"x" * 10
    part.release()
    view.release()
    view.release()
    pool.collect()
    assert pool.lent_bytes == slot_bytes(1000)


def test_a_slot_being_written_is_unreadable_and_an_exception_releases_it(pool, reader):
    earlier = pool.put(b"first", "r").handle
    assert read(reader, earlier) == b"first"
    with pool.lease(5) as lease:
        assert why(reader, earlier) == "stale"
        lease.buffer[:] = b"later"
        handle = lease.publish("r")
    assert read(reader, handle) == b"later"
    with pytest.raises(ZeroDivisionError), pool.lease(5) as lease:
        lease.buffer[:] = bytes([1 // 0]) * 5
    pool.collect()
    assert pool.lent_bytes == 0


def test_a_slot_whose_buffer_is_still_used_is_neither_published_nor_reused(pool):
    lease = pool.lease(100)
    part = lease.buffer[:10]
    with pytest.raises(BufferError):
        lease.publish("r")
    lease.release()
    pool.collect()
    assert pool.lent_bytes == slot_bytes(100)
    part.release()
    pool.collect()
    assert pool.lent_bytes == 0


def test_unused_slots_are_trimmed_and_used_ones_are_not(root):
    with Pool(root, "writer", limit_bytes=16 * MIB) as pool, Reader(root) as reader:
        used, unused = (pool.put(bytes(size), "r") for size in (1000, 100_000))
        kept = pool.put(bytes(1000), "r")
        for lease in (used, unused):
            read(reader, lease.handle)
        pool.trim_unused()  # takes them back
        assert pool.bytes == 2 * slot_bytes(1000) + slot_bytes(100_000)
        read(reader, pool.put(b"again", "r").handle)
        pool.trim_unused()
        assert pool.bytes == 2 * slot_bytes(1000)
        assert read(reader, kept.handle) == bytes(1000)
        pool.trim_unused()
        pool.trim_unused()
        assert (pool.bytes, bytes_below(root / pool.name)) == (0, 4 * KIB)
    pool.trim_unused()


def test_a_thread_trims_the_pools_of_the_process(root, monkeypatch):
    monkeypatch.setattr(pool_module, "TRIM_SECONDS", 0.01)
    with Pool(root, "writer", limit_bytes=MIB) as pool, Pool(root, "other", limit_bytes=MIB) as other:
        released, leased = pool.put(b"x", "r"), other.put(b"x", "r")
        released.release()
        deadline = time.monotonic() + 60
        while pool.bytes:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert other.bytes == slot_bytes(1)
        with Reader(root) as reader:
            assert read(reader, leased.handle) == b"x"
    gone = weakref.ref(pool)
    del pool, other, released, leased
    while gone() is not None:  # the thread may be trimming it
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_removed_slot_frees_its_memory_while_a_reader_has_it_mapped(root, pool, reader):
    handle = pool.put(os.urandom(16 * MIB), "r").handle
    number = os.open(root / handle.path, os.O_RDONLY)
    read(reader, handle)
    trim(pool)
    assert os.fstat(number).st_blocks == 0
    os.close(number)
    assert why(reader, handle) == "gone"
    read(reader, pool.put(b"another", "r").handle)
    assert len(reader._slots) == 1


def test_a_handle_that_differs_from_the_slot_is_corrupt_and_an_older_one_stale(root, pool, reader):
    handle = pool.put(os.urandom(64), "r").handle
    values = handle.to_json()
    for reason, changes in {
        "corrupt": [{"checksum": handle.checksum ^ 1}, {"length": handle.length - 1}],
        "stale": [{"generation": handle.generation + 1}],
        "truncated": [{"length": size} for size in (1 << 17, 1 << 62)],
        "gone": [{"path": handle.path + "f"}],
    }.items():
        assert {why(reader, read_handle({**values, **change})) for change in changes} == {reason}
    os.truncate(root / handle.path, 100)
    assert why(reader, handle) == "truncated"
    with Reader(root) as fresh:
        assert why(fresh, handle) == "truncated"


def test_only_regular_files_below_the_root_are_opened(root, tmp_path):
    secret = tmp_path / "slot-1"
    with Pool(root, "writer", limit_bytes=8 * MIB) as pool:
        real = pool.put(b"secret", "r").handle
        secret.write_bytes((root / real.path).read_bytes())
        folder = root / "pool-evil"
        folder.mkdir()
        (folder / "slot-1").symlink_to(secret)
        (folder / "slot-2").symlink_to(root / real.path)
        os.mkfifo(folder / "slot-3")
        (folder / "slot-4").mkdir()
        (root / "pool-link").symlink_to(tmp_path)
        (folder / "slot-5").write_bytes(b"")
        (folder / "slot-6").write_bytes((root / real.path).read_bytes())
        with Reader(root) as reader:
            others = [f"pool-evil/slot-{number}" for number in range(1, 7)]
            # The last but one is a copy of a slot, which is not that slot.
            reasons = [*["refused"] * 4, "gone", "corrupt", "refused"]
            for name, reason in zip([*others, "pool-link/slot-1"], reasons, strict=True):
                assert why(reader, read_handle({**real.to_json(), "path": name})) == reason
            assert read(reader, real) == b"secret"
    reclaim(root, 0.0)
    assert secret.exists()


def test_a_truncated_slot_is_unread_and_never_touched_again(root, pool):
    leases = [pool.put(b"x", "r") for _ in range(3)]
    os.truncate(root / leases[0].handle.path, 0)
    os.truncate(root / leases[1].handle.path, 0)
    leases[1].release()
    leases[2].release()
    os.truncate(root / leases[2].handle.path, 0)
    pool.collect()
    assert pool.put(b"y", "r").handle.path not in [lease.handle.path for lease in leases]
    assert pool.bytes == slot_bytes(1)


def test_cached_mappings_are_bounded(root):
    with Pool(root, "w", limit_bytes=8 * MIB) as pool, Reader(root, mapped_bytes=2 * slot_bytes(1)) as reader:
        handles = [pool.put(b"x", "r").handle for _ in range(6)]
        for handle in handles:
            reader.open(handle).release(acknowledge=False)
            assert len(reader._slots) <= 3
        assert read(reader, handles[0]) == b"x"


def test_case_61_a_crash_on_item_2_leaves_no_segment_and_the_refetch_handle_serves_the_request(root, clock):
    """Once with an exception in the writer, and once with the writer killed."""
    pool = Pool(root, "writer", limit_bytes=8 * MIB, now=clock)
    with pytest.raises(TypeError):
        pool.put(object(), "image 0")
    assert pool.lent_bytes == 0
    leases = [pool.put(b"payload", f"image {number}") for number in range(3)]
    pool.lease(100)
    crash_pool(pool)
    clock.now += 61
    assert reclaim(root, clock.now).slots == 4
    assert os.listdir(root) == []
    with Reader(root) as reader:
        assert [why(reader, lease.handle) for lease in leases] == ["gone"] * 3
    assert [lease.handle.refetch for lease in leases] == ["image 0", "image 1", "image 2"]


def test_case_61_a_failing_reader_frees_the_slot(pool, reader):
    with pytest.raises(ZeroDivisionError), reader.open(pool.put(b"x", "r").handle):
        raise ZeroDivisionError
    pool.collect()
    assert pool.lent_bytes == 0


def test_case_65_a_cancelled_request_frees_unread_slots_at_once(pool, reader):
    unread, being_read = (pool.put(payload, "r") for payload in (b"a", b"b"))
    with reader.open(being_read.handle):
        unread.release()
        being_read.release()
        assert pool.lent_bytes == slot_bytes(1)
    pool.collect()
    assert pool.lent_bytes == 0
