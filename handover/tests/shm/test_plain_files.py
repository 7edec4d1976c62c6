"""Plain files: whole or not there, bounded, gone when they are released, and when their writer is dead."""

import os
import stat
import threading

import pytest

from handover.tests.support import Clock, bytes_below, crash_plain_files, outcome
from mmrouter_handover.shm import HandOverError, Plains, Pool, ledger, reclaim
from mmrouter_handover.shm.slot import LEASE_SECONDS, MAX_LEASE_SECONDS
from mmrouter_handover.shm.slot_sizes import PAGE_BYTES, slot_bytes

MIB = 1 << 20
PAGE = PAGE_BYTES


@pytest.fixture
def clock():
    return Clock()


def full(call):
    return outcome(call)[1] == "full"


def test_a_plain_file_is_its_payload_and_nothing_else_and_is_gone_when_it_is_released(root):
    with Plains(root, "router-1", MIB) as plains:
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


def test_its_name_tells_nothing_of_it_and_it_is_for_the_group_to_read_and_for_nobody_else(root):
    before = os.umask(0o077)
    try:
        with Plains(root, "a router/of: ours", MIB) as plains:
            files = [plains.put(b"secret", ".jpg", key="tenant 7: m1-aa") for plains in (plains,) * 2]
            names = {file.path.name for file in files} | {plains.put(b"secret", ".jpg").path.name}
            assert not any("tenant" in name or "m1" in name for name in names)
            assert stat.S_IMODE(files[0].path.stat().st_mode) == 0o640
            assert stat.S_IMODE(files[0].path.parent.stat().st_mode) == 0o2770
            assert files[0].path.parent.name.startswith("pool-a_router_of_ours-")
            assert len({name.partition("-")[2].partition("-")[2] for name in names}) == 2
    finally:
        os.umask(before)


def test_a_file_that_is_half_written_has_no_name_that_anybody_is_told(root, monkeypatch):
    """Every name below the root is looked at in the middle of the writing, by the writer's own thread."""
    seen = []
    real = os.write

    def slow(number, data):
        if len(data) > 1000:
            seen.append({entry.path: entry.state for entry in ledger(root, plains._now()).entries})
            return real(number, data[:1000])
        return real(number, data)

    payload = os.urandom(5000)
    with Plains(root, "w", MIB) as plains:
        monkeypatch.setattr(os, "write", slow)
        file = plains.put(payload)
        path = f"{plains.name}/{file.path.name}"
        assert len(seen) == 4
        assert all(path not in states for states in seen)
        assert all(sorted(states.values()) == ["owner", "writing"] for states in seen)
        assert file.path.read_bytes() == payload


def test_a_reader_that_has_a_file_open_reads_it_to_its_end_after_it_was_released(root):
    payload = os.urandom(MIB)
    with Plains(root, "w", 2 * MIB) as plains:
        file = plains.put(payload)
        with file.path.open("rb") as reader:
            first = reader.read(1000)
            file.release()
            assert first + reader.read() == payload


def test_one_payload_that_several_requests_show_is_one_file_until_the_last_has_let_go(root, clock):
    with Plains(root, "w", MIB, now=clock) as plains:
        one = plains.put(b"image", ".png", key="identity", seconds=10)
        clock.now += 5
        two = plains.put(b"image", ".png", key="identity", seconds=10)
        other = plains.put(b"image", ".webp", key="identity")
        assert one.path == two.path != other.path
        assert plains.bytes == 2 * PAGE
        deadline = {e.path: e.deadline for e in ledger(root, clock.now).entries}[f"{plains.name}/{one.path.name}"]
        assert deadline == 1015.0  # the later one
        one.release()
        one.release()
        assert two.path.read_bytes() == b"image"
        two.release()
        assert not two.path.exists()
        again = plains.put(b"image", ".png", key="identity")
        assert again.path != one.path
        assert again.path.read_bytes() == b"image"


def test_a_writer_never_has_more_than_its_limit_and_is_told_full(root):
    with Plains(root, "w", 10 * PAGE, high_water=0.5) as plains:
        files = [plains.put(bytes(PAGE)) for _ in range(5)]
        assert full(lambda: plains.put(b"x"))
        assert full(lambda: plains.put(bytes(20 * PAGE)))
        files[0].release()
        assert plains.put(b"x").path.exists()
        assert plains.bytes == 5 * PAGE


def test_all_writers_of_a_root_have_one_bound_together_and_see_what_strangers_left(root, clock):
    total = 40 * slot_bytes(1)
    bounds = {"total_bytes": total, "high_water": 0.5, "now": clock}
    with (
        Plains(root, "one", total, **bounds) as one,
        Plains(root, "two", total, **bounds) as two,
        Pool(root, "three", limit_bytes=2 * total, **bounds) as three,
    ):
        mine = one.put(bytes(total // 4))
        assert full(lambda: two.put(bytes(total // 4)))
        clock.now += 1  # a look at the others is good for one second
        (root / "stranger").write_bytes(bytes(total // 4 - 2 * slot_bytes(1)))
        three.put(b"x", "r")
        assert full(lambda: three.put(bytes(total // 4), "r"))
        assert full(lambda: two.put(bytes(total // 4)))
        mine.release()
        clock.now += 1
        assert two.put(bytes(total // 4)).path.exists()
        clock.now += 1
        assert full(lambda: one.put(bytes(total // 4)))


def test_what_cannot_be_written_is_full_and_leaves_nothing(root, monkeypatch):
    def broken(number, data):
        raise OSError(28, "No space left on device")

    with Plains(root, "w", MIB) as plains:
        monkeypatch.setattr(os, "write", broken)
        with pytest.raises(HandOverError, match="No space left") as error:
            plains.put(b"x")
        assert error.value.reason == "full"
        assert os.listdir(plains.folder) == ["owner"]
        assert plains.bytes == 0


@pytest.mark.parametrize("wrong", [{"suffix": "/../x"}, {"suffix": "png"}, {"seconds": 0}, {"seconds": 3601}])
def test_a_suffix_or_a_time_that_is_none_is_refused(root, wrong):
    with Plains(root, "w", MIB) as plains:
        with pytest.raises(ValueError, match="no file"):
            plains.put(b"x", **wrong)
        assert os.listdir(plains.folder) == ["owner"]


def test_the_ledger_knows_plain_files(root, clock):
    clock.now = 5000.5
    plains = Plains(root, "router a", MIB, now=clock)
    file = plains.put(bytes(5000), ".png", seconds=10)
    (plains.folder / "plain-zz").mkdir()
    (plains.folder / "draft-plain-1388-1").write_bytes(b"half")
    clock.now += 100
    found = {entry.path.rpartition("/")[2]: entry for entry in ledger(root, clock.now).entries}
    told = found[file.path.name]
    assert (told.state, told.writer, told.lives, told.bytes) == ("leased", "router a", True, 2 * PAGE)
    assert (told.since, told.deadline) == (5000.5, 5010.5)
    assert (found["draft-plain-1388-1"].state, found["draft-plain-1388-1"].since) == ("writing", 5.0)
    assert ledger(root, clock.now).bytes == bytes_below(root)
    crash_plain_files(plains)
    states = {entry.state for entry in ledger(root, clock.now).entries if entry.path.endswith(".png")}
    assert states == {"expired"}


def test_what_a_dead_writer_left_is_kept_until_its_deadline_and_half_of_a_file_not_at_all(root, clock):
    plains = Plains(root, "w", MIB, now=clock)
    short, long, shared = plains.put(b"s", seconds=5), plains.put(b"l"), plains.put(b"k", key="k", seconds=5)
    plains.put(b"k", key="k", seconds=20)
    (plains.folder / "draft-plain-1-1").write_bytes(b"half")
    clock.now += 10
    assert reclaim(root, clock.now).files == 0  # its writer lives
    crash_plain_files(plains)
    first = reclaim(root, clock.now)
    assert (first.files, first.kept, first.pools, first.bytes) == (2, 2, 0, 2 * PAGE)
    assert not short.path.exists()
    assert (long.path.read_bytes(), shared.path.read_bytes()) == (b"l", b"k")
    clock.now += 10
    assert (reclaim(root, clock.now).files, long.path.exists()) == (1, True)
    clock.now += LEASE_SECONDS
    last = reclaim(root, clock.now)
    assert (last.files, last.pools, last.kept) == (1, 1, 0)
    assert os.listdir(root) == []


def test_a_deadline_further_away_than_any_lease_lasts_protects_nothing(root, clock):
    plains = Plains(root, "w", MIB, now=clock)
    files = [plains.put(b"x"), plains.put(b"y")]
    for file, seconds in zip(files, (MAX_LEASE_SECONDS, MAX_LEASE_SECONDS + 2), strict=True):
        os.utime(file.path, (0, clock.now + seconds))
    crash_plain_files(plains)
    assert (reclaim(root, clock.now).kept, [file.path.exists() for file in files]) == (1, [True, False])


def test_a_writer_that_ends_leaves_to_the_janitor_what_is_not_released(root, clock):
    plains = Plains(root, "w", MIB, now=clock)
    file, done = plains.put(b"x", seconds=5), plains.put(b"y")
    done.release()
    plains.close()
    plains.close()
    file.release()  # late, and of no effect
    assert full(lambda: plains.put(b"z"))
    assert file.path.read_bytes() == b"x"
    clock.now += 6
    assert reclaim(root, clock.now).files == 1
    assert os.listdir(root) == []


def test_threads_that_write_at_once_each_have_their_own_file_and_the_bytes_are_counted(root):
    payloads = [bytes([number]) * 50_000 for number in range(8)]
    with Plains(root, "w", 8 * MIB) as plains:
        files = {}
        threads = [
            threading.Thread(target=lambda payload=payload: files.update({payload: plains.put(payload, key="")}))
            for payload in payloads
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {file.path.read_bytes() for file in files.values()} == set(payloads)
        assert plains.bytes == bytes_below(plains.folder) - PAGE  # its owner file
        for file in files.values():
            file.release()
        assert plains.bytes == 0
