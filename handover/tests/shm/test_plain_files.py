"""Plain files: whole or absent, bounded, and removed when they are released or their writer is dead."""

import os
import stat
import threading

import pytest

from handover.tests.support import bytes_below, outcome
from mmrouter_handover.shm import HandOverError, PlainFiles, Pool, ledger, reclaim
from mmrouter_handover.shm.files import clock as boot_clock
from mmrouter_handover.shm.slot_format import LEASE_SECONDS, MAX_LEASE_SECONDS, PAGE_BYTES, slot_bytes

MIB = 1 << 20
PAGE = PAGE_BYTES


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


def test_names_reveal_no_key_and_only_the_group_may_read(root):
    before = os.umask(0o077)
    try:
        with PlainFiles(root, "a router/of: ours", MIB) as plains:
            files = [plains.put(b"secret", ".jpg", key="tenant 7: m1-aa") for plains in (plains,) * 2]
            names = {file.path.name for file in files} | {plains.put(b"secret", ".jpg").path.name}
            assert not any("tenant" in name or "m1" in name for name in names)
            assert stat.S_IMODE(files[0].path.stat().st_mode) == 0o640
            assert stat.S_IMODE(files[0].path.parent.stat().st_mode) == 0o2770
            assert files[0].path.parent.name.startswith("pool-a_router_of_ours-")
            assert len({name.partition("-")[2].partition("-")[2] for name in names}) == 2
    finally:
        os.umask(before)


def test_a_half_written_file_is_not_visible_under_its_final_name(root, monkeypatch):
    """The ledger is read in the middle of the write."""
    seen = []
    real = os.write

    def slow(number, data):
        if len(data) > 1000:
            seen.append({entry.path: entry.state for entry in ledger(root, boot_clock()).entries})
            return real(number, data[:1000])
        return real(number, data)

    payload = os.urandom(5000)
    with PlainFiles(root, "w", MIB) as plains:
        monkeypatch.setattr(os, "write", slow)
        file = plains.put(payload)
        path = f"{plains.name}/{file.path.name}"
        assert len(seen) == 4
        assert all(path not in states for states in seen)
        assert all(sorted(states.values()) == ["owner", "writing"] for states in seen)
        assert file.path.read_bytes() == payload


def test_an_open_file_can_be_read_to_its_end_after_its_release(root):
    payload = os.urandom(MIB)
    with PlainFiles(root, "w", 2 * MIB) as plains:
        file = plains.put(payload)
        with file.path.open("rb") as reader:
            first = reader.read(1000)
            file.release()
            assert first + reader.read() == payload


def test_requests_with_one_key_share_a_file_until_the_last_release(root, clock):
    with PlainFiles(root, "w", MIB, now=clock) as plains:
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


def test_a_writer_at_its_limit_gets_full(root):
    with PlainFiles(root, "w", 10 * PAGE, high_water=0.5) as plains:
        files = [plains.put(bytes(PAGE)) for _ in range(5)]
        assert is_full(lambda: plains.put(b"x"))
        assert is_full(lambda: plains.put(bytes(20 * PAGE)))
        files[0].release()
        assert plains.put(b"x").path.exists()
        assert plains.bytes == 5 * PAGE


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


def test_a_failed_write_is_full_and_leaves_nothing(root, monkeypatch):
    def broken(number, data):
        raise OSError(28, "No space left on device")

    with PlainFiles(root, "w", MIB) as plains:
        monkeypatch.setattr(os, "write", broken)
        with pytest.raises(HandOverError, match="No space left") as error:
            plains.put(b"x")
        assert error.value.reason == "full"
        assert os.listdir(plains.folder) == ["owner"]
        assert plains.bytes == 0


@pytest.mark.parametrize("wrong", [{"suffix": "/../x"}, {"suffix": "png"}, {"seconds": 0}, {"seconds": 3601}])
def test_an_invalid_suffix_or_time_is_refused(root, wrong):
    with PlainFiles(root, "w", MIB) as plains:
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


def test_files_of_a_dead_writer_last_until_their_deadlines_and_drafts_do_not(root, clock):
    plains = PlainFiles(root, "w", MIB, now=clock)
    short, long, shared = plains.put(b"s", seconds=5), plains.put(b"l"), plains.put(b"k", key="k", seconds=5)
    plains.put(b"k", key="k", seconds=20)
    (plains.folder / "draft-plain-1-1").write_bytes(b"half")
    clock.now += 10
    assert reclaim(root, clock.now).files == 0  # its writer lives
    plains.abandon()
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


def test_a_deadline_beyond_the_longest_lease_protects_nothing(root, clock):
    plains = PlainFiles(root, "w", MIB, now=clock)
    files = [plains.put(b"x"), plains.put(b"y")]
    for file, seconds in zip(files, (MAX_LEASE_SECONDS, MAX_LEASE_SECONDS + 2), strict=True):
        os.utime(file.path, (0, clock.now + seconds))
    plains.abandon()
    assert (reclaim(root, clock.now).kept, [file.path.exists() for file in files]) == (1, [True, False])


def test_closing_a_writer_leaves_unreleased_files_to_the_janitor(root, clock):
    plains = PlainFiles(root, "w", MIB, now=clock)
    file, done = plains.put(b"x", seconds=5), plains.put(b"y")
    done.release()
    plains.close()
    plains.close()
    file.release()  # no effect any more
    assert is_full(lambda: plains.put(b"z"))
    assert file.path.read_bytes() == b"x"
    clock.now += 6
    assert reclaim(root, clock.now).files == 1
    assert os.listdir(root) == []


def test_concurrent_writes_have_files_of_their_own_and_are_counted(root):
    payloads = [bytes([number]) * 50_000 for number in range(8)]
    with PlainFiles(root, "w", 8 * MIB) as plains:
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
