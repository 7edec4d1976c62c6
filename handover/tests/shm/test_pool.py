"""Pools and readers in one process; flock(2) locks belong to open files, so they work here as between processes."""

import json
import os
import stat
import time
import weakref
from functools import partial

import pytest

from handover.tests.support import bytes_below, crash_pool, outcome
from mmrouter_handover.shm import Handle, HandOverError, Pool, Reader, ledger, read_handle, reclaim
from mmrouter_handover.shm import pool as pool_module
from mmrouter_handover.shm.slot_format import PAGE_BYTES, checksum, slot_bytes

KIB = 1 << 10
MIB = 1 << 20


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
    assert bytes_below(root) == 0
    assert os.listdir(root) == []


def test_a_view_is_a_read_only_window_on_the_slot(root):
    with Pool(root, "writer", limit_bytes=MIB) as pool, Reader(root) as reader:
        handle = pool.put(bytes(range(48)), "again", dtype="float64", shape=(2, 3)).handle
        with reader.open(handle) as view:
            assert view.data.readonly
            assert (view.handle.dtype, view.handle.shape) == ("float64", (2, 3))
            number = os.open(root / handle.path, os.O_RDWR)
            os.pwrite(number, b"\xff", PAGE_BYTES)
            os.close(number)
            assert view.data[0] == 0xFF


def test_a_slot_is_reused_only_when_acknowledged_released_or_expired(root, clock):
    with Pool(root, "writer", limit_bytes=4 * MIB, now=clock) as pool, Reader(root) as reader:
        read_one = pool.put(b"a", "r", seconds=5)
        released = pool.put(b"b", "r", seconds=5)
        unread = pool.put(b"c", "r", seconds=5)
        paths = [lease.handle.path for lease in (read_one, released, unread)]
        assert len(set(paths)) == 3
        assert read(reader, read_one.handle) == b"a"
        assert pool.put(b"d", "r", seconds=50).handle.path == paths[0]
        assert why(reader, read_one.handle) == "stale"
        released.release()
        assert why(reader, released.handle) == "stale"
        assert pool.put(b"e", "r", seconds=50).handle.path == paths[1]
        released.release()  # again, and late: another lease has the slot by now
        clock.now += 4.9
        assert pool.put(b"f", "r", seconds=50).handle.path not in paths
        clock.now += 0.2
        assert pool.put(b"g", "r", seconds=50).handle.path == paths[2]
        assert why(reader, unread.handle) == "stale"


def test_a_slot_with_a_reader_is_not_reused_after_release_or_expiry(root, clock):
    with Pool(root, "writer", limit_bytes=MIB, now=clock) as pool, Reader(root) as reader, Reader(root) as other:
        lease = pool.put(b"x" * 1000, "r", seconds=5)
        view, second = reader.open(lease.handle), other.open(lease.handle)
        third = reader.open(lease.handle)
        lease.release()
        clock.now += 100
        for held in (view, second, third):
            assert pool.put(b"y" * 1000, "r").handle.path != lease.handle.path
            assert bytes(held.data) == b"x" * 1000
            held.release()
        pool.collect()
        assert pool.lent_bytes == 3 * slot_bytes(1000)
        assert pool.put(b"z", "r").handle.path == lease.handle.path


def test_a_view_with_a_live_slice_is_not_released(root):
    with Pool(root, "writer", limit_bytes=MIB) as pool, Reader(root) as reader:
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


def test_an_unacknowledged_payload_can_be_read_again_until_its_deadline(root, clock):
    with Pool(root, "writer", limit_bytes=MIB, now=clock) as pool, Reader(root) as reader:
        lease = pool.put(b"abc", "r", seconds=5)
        for _ in range(3):
            reader.open(lease.handle).release(acknowledge=False)
            pool.collect()
            assert pool.lent_bytes == slot_bytes(3)
        clock.now += 5
        pool.collect()
        assert pool.lent_bytes == 0


def test_a_slot_being_written_is_unreadable_and_an_exception_releases_it(root):
    with Pool(root, "writer", limit_bytes=MIB) as pool, Reader(root) as reader:
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


def test_a_slot_whose_buffer_is_still_used_is_neither_published_nor_reused(root):
    with Pool(root, "writer", limit_bytes=MIB) as pool:
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


@pytest.mark.parametrize("values", [{"dtype": "object"}, {"shape": (3,)}, {"dtype": "float32", "shape": (5,)}])
def test_a_wrong_dtype_or_shape_is_not_published_and_leaves_nothing_lent(root, values):
    with Pool(root, "writer", limit_bytes=MIB) as pool:
        with pytest.raises(ValueError, match=r"dtype|bytes"):
            pool.put(b"12345678", "r", **values)
        assert pool.lent_bytes == 0


def test_above_the_high_water_mark_a_lease_is_full(root):
    with Pool(root, "writer", limit_bytes=10 * slot_bytes(1), high_water=0.5) as pool, Reader(root) as reader:
        leases = [pool.put(b"x", "r") for _ in range(5)]
        with pytest.raises(HandOverError) as error:
            pool.put(b"x", "r")
        assert error.value.reason == "full"
        assert read(reader, leases[2].handle) == b"x"
        assert pool.put(b"y", "r").handle.path == leases[2].handle.path
        with pytest.raises(HandOverError, match="full"):
            pool.put(bytes(20 * slot_bytes(1)), "r")


def test_idle_slots_of_one_class_are_evicted_for_another_within_the_bound(root):
    limit = 2 * slot_bytes(64 * KIB) + slot_bytes(256 * KIB)
    with Pool(root, "writer", limit_bytes=limit, high_water=1.0) as pool, Reader(root) as reader:
        for _ in range(4):
            for size in (64 * KIB, 256 * KIB, 128 * KIB, 65 * KIB):
                leases = [pool.put(bytes(size), "r") for _ in range(limit // slot_bytes(size))]
                assert pool.bytes <= limit
                assert bytes_below(root) <= limit + 4 * KIB
                for lease in leases:
                    assert read(reader, lease.handle) == bytes(size)
        assert pool.trim(keep_bytes=slot_bytes(64 * KIB)) > 0
        assert pool.bytes <= slot_bytes(64 * KIB)


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
    monkeypatch.setattr(pool_module, "TRIMMER", pool_module.Trimmer())  # the process's own sleeps for 30 seconds
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


def test_a_removed_slot_frees_its_memory_while_a_reader_has_it_mapped(root):
    with Pool(root, "writer", limit_bytes=32 * MIB) as pool, Reader(root) as reader:
        handle = pool.put(os.urandom(16 * MIB), "r").handle
        number = os.open(root / handle.path, os.O_RDONLY)
        read(reader, handle)
        assert pool.trim() == slot_bytes(16 * MIB)
        assert os.fstat(number).st_blocks == 0
        os.close(number)
        assert why(reader, handle) == "gone"
        reader.sweep()
        assert reader.mapped_slots == 0


def test_a_full_checksum_is_computed_and_compared_on_request(root):
    payload = bytearray(os.urandom(MIB))
    with Pool(root, "writer", limit_bytes=8 * MIB) as pool, Reader(root) as reader:
        for check, found in (("full", "corrupt"), ("sampled", None)):
            handle = pool.put(payload, "r", check=check).handle
            assert handle.checksum == checksum(memoryview(payload), check)
            with (root / handle.path).open("r+b") as file:
                file.seek(PAGE_BYTES + 1001)  # between two samples
                file.write(bytes([payload[1001] ^ 1]))
            if found:
                assert why(reader, handle) == found
            else:
                assert read(reader, handle) != payload


def test_a_handle_that_differs_from_the_slot_is_corrupt_and_an_older_one_stale(root):
    with Pool(root, "writer", limit_bytes=8 * MIB) as pool, Reader(root) as reader:
        handle = pool.put(os.urandom(64), "r").handle
        values = handle.to_json()
        for changes, reason in (
            ({"checksum": handle.checksum ^ 1}, "corrupt"),
            ({"check": "full"}, "corrupt"),
            ({"shape": [8, 8]}, "corrupt"),
            ({"dtype": "int8"}, "corrupt"),
            ({"generation": handle.generation + 1}, "stale"),
            ({"length": 1 << 17, "shape": [1 << 17]}, "truncated"),
            ({"length": 1 << 62, "shape": [1 << 62]}, "truncated"),
            ({"path": handle.path + "f"}, "gone"),
        ):
            assert why(reader, read_handle({**values, **changes})) == reason
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
            for name in (
                "pool-evil/slot-1",
                "pool-evil/slot-2",
                "pool-evil/slot-3",
                "pool-evil/slot-4",
                "pool-link/slot-1",
            ):
                assert why(reader, read_handle({**real.to_json(), "path": name})) == "refused"
            assert why(reader, read_handle({**real.to_json(), "path": "pool-evil/slot-5"})) == "gone"
            # The copy of a slot is not that slot.
            assert why(reader, read_handle({**real.to_json(), "path": "pool-evil/slot-6"})) == "corrupt"
            assert read(reader, real) == b"secret"
    reclaim(root, 0.0)
    assert secret.exists()


def test_slots_are_accessible_to_the_group_only(root):
    before = os.umask(0o077)
    try:
        with Pool(root, "a writer/of: ours", limit_bytes=MIB) as pool:
            path = root / pool.put(b"x", "r").handle.path
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o2770
            assert path.parent.name.startswith("pool-a_writer_of_ours-")
    finally:
        os.umask(before)


def test_two_pools_of_one_writer_are_independent(root):
    with Pool(root, "w", limit_bytes=MIB) as one, Pool(root, "w", limit_bytes=MIB) as two, Reader(root) as reader:
        handles = [pool.put(name, "r").handle for pool, name in ((one, b"one"), (two, b"two"))]
        assert [handle.generation for handle in handles] == [1, 1]
        assert [read(reader, handle) for handle in handles] == [b"one", b"two"]


def test_a_truncated_slot_is_unread_and_never_touched_again(root):
    with Pool(root, "writer", limit_bytes=8 * MIB) as pool:
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
            assert reader.mapped_slots <= 3
        assert read(reader, handles[0]) == b"x"


def test_case_61_a_crash_on_item_2_leaves_no_segment_and_the_refetch_handle_serves_the_request(root, clock):
    """Once with an exception in the writer, and once with the writer killed."""
    images = {"image 0": b"first", "image 1": b"second", "image 2": b"third"}

    class Unreadable:
        pass

    pool = Pool(root, "writer", limit_bytes=8 * MIB, now=clock)
    with pytest.raises(TypeError):
        pool.put_all([(images["image 0"], "image 0"), (images["image 1"], "image 1"), (Unreadable(), "image 2")])
    assert pool.lent_bytes == 0
    leases = pool.put_all([(payload, name) for name, payload in images.items()])
    pool.lease(100)
    crash_pool(pool)
    clock.now += 61
    assert reclaim(root, clock.now).slots == 4
    assert bytes_below(root) == 0
    assert os.listdir(root) == []
    with Reader(root) as reader:
        received = []
        for lease in leases:
            found, reason = outcome(partial(read, reader, lease.handle))
            assert (found, reason) == (None, "gone")
            received.append(images[lease.handle.refetch])
    assert received == list(images.values())


def test_case_61_a_failing_reader_frees_the_slot(root):
    with Pool(root, "writer", limit_bytes=MIB) as pool, Reader(root) as reader:
        lease = pool.put(b"x", "r")
        with pytest.raises(ZeroDivisionError), reader.open(lease.handle):
            raise ZeroDivisionError
        pool.collect()
        assert pool.lent_bytes == 0


def test_case_65_a_cancelled_request_frees_unread_slots_at_once(root):
    with Pool(root, "writer", limit_bytes=8 * MIB) as pool, Reader(root) as reader:
        unread, being_read = pool.put_all([(b"a", "r"), (b"b", "r")])
        view = reader.open(being_read.handle)
        unread.release()
        being_read.release()
        assert pool.lent_bytes == slot_bytes(1)
        view.release()
        pool.collect()
        assert pool.lent_bytes == 0
        pool.trim()
        assert pool.bytes == 0


def test_closing_a_pool_leaves_leased_slots_to_the_janitor(root, clock):
    with Reader(root) as reader:
        with Pool(root, "w", limit_bytes=MIB, now=clock) as pool:
            kept, done = pool.put(b"kept", "r", seconds=5).handle, pool.put(b"done", "r").handle
            read(reader, done)
        pool.close()
        with pytest.raises(HandOverError, match="full"):
            pool.lease(1)
        assert [entry.state for entry in ledger(root, clock.now).entries] == ["owner", "leased"]
        assert reclaim(root, clock.now).kept == 1
        assert read(reader, kept) == b"kept"
        assert reclaim(root, clock.now).slots == 1
    assert os.listdir(root) == []
