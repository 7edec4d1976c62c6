"""The shared directory: the rules of its janitor, and access to it, with real folders and users."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_handover.shm import Entry, Ledger
from mmrouter_sidecar.shared_memory import cleanup_rules as rules
from mmrouter_sidecar.shared_memory.folder_access import MODE, SharedFolderError, main, open_folder

NOW = 1e9
HUGE = 1 << 40


def encoders(name: str, size: int, unused: float) -> Entry:
    return Entry(f"{name}/encoder_cache.safetensors", size, "other", used=(0.0, NOW - unused))


def book(*entries: Entry, capacity: int = HUGE, available: int = HUGE) -> Ledger:
    return Ledger(entries, capacity, available)


def ages(found: Ledger) -> dict[str, float]:
    return {path: NOW - max(used) for path, used in rules.encoders_files(found).items()}


def going(found: Ledger, limit: int, *, was_above: bool = False) -> list[tuple[str, str]]:
    figures = rules.shared(found, limit, was_above=was_above)
    return [(one.entry.path.partition("/")[0], one.reason) for one in rules.removals(found, figures, ages(found))]


def test_least_recently_used_files_are_removed_down_to_the_low_mark() -> None:
    found = book(*(encoders(name, 100, age) for name, age in (("b", 200), ("c", 150), ("a", 300), ("d", 100))))
    assert going(found, 1000) == []
    assert going(found, 500) == [("a", "pressure")]
    assert going(found, 400) == [("a", "pressure"), ("b", "pressure")]
    assert [name for name, _ in going(found, 1)] == ["a", "b", "c", "d"]


def test_recently_used_files_stay_under_any_pressure() -> None:
    found = book(encoders("young", 900, rules.UNUSED_SECONDS - 1), encoders("old", 10, rules.UNUSED_SECONDS))
    assert going(found, 100) == [("old", "pressure")]


def test_files_unused_for_an_hour_are_removed_without_pressure() -> None:
    found = book(encoders("old", 10, rules.FORGOTTEN_SECONDS), encoders("young", 10, rules.FORGOTTEN_SECONDS - 1))
    assert going(found, 10_000) == [("old", "unused")]
    assert going(found, 0) == [("old", "unused")]


def test_only_encoder_files_are_removed() -> None:
    others = (
        Entry("pool-a/slot-1", 500, "leased", "w", True),
        Entry("pool-a/plain-1", 500, "leased", "w", True),
        Entry("notes", 500, "other", used=(0.0, 0.0)),
        Entry("a/encoder_cache.safetensors.bak", 500, "other", used=(0.0, 0.0)),
        Entry("pool-a/slot-2", 500, "unreadable"),
    )
    assert going(book(*others), 100) == []


def test_the_space_of_the_file_system_bounds_as_the_limit_does() -> None:
    full = book(encoders("a", 100, 200), encoders("b", 100, 100), capacity=1000, available=150)
    assert rules.pressure(full, 0) == 0.85
    assert going(full, 0) == [("a", "pressure"), ("b", "pressure")]
    # Others than us fill it: all that is ours to give goes, and no more is hoped for.
    assert (
        rules.surplus(rules.shared(book(encoders("a", 10, 200), capacity=1000, available=100), 0, was_above=False))
        == 10
    )


def test_above_the_high_mark_it_stays_above_until_it_is_below_the_low_one() -> None:
    above, states = False, []
    for taken in (79, 80, 75, 70, 69, 75, 81):
        above = rules.shared(book(encoders("a", taken, 1)), 100, was_above=above).above
        states.append(above)
    assert states == [False, True, True, True, False, False, True]
    assert (rules.HIGH_WATER, rules.LOW_WATER) == (0.8, 0.7)


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(0, 10_000)), max_size=12),
    st.integers(0, 10**10),
    st.integers(0, 10**10),
)
def test_after_removals_usage_is_below_the_mark_or_no_file_is_removable(
    files: list[tuple[int, float]], limit: int, room: int
) -> None:
    entries = [encoders(f"{number}", size, age) for number, (size, age) in enumerate(files)]
    taken = sum(size for size, _ in files)
    found = book(*entries, capacity=taken + room, available=room)
    figures = rules.shared(found, limit, was_above=False)
    gone = rules.removals(found, figures, ages(found))
    assert all(ages(found)[one.entry.path] >= rules.UNUSED_SECONDS for one in gone)
    kept = [entry for entry in entries if entry not in [one.entry for one in gone]]
    freed = taken - sum(entry.bytes for entry in kept)
    after = rules.shared(book(*kept, capacity=taken + room, available=room + freed), limit, was_above=figures.above)
    assert (
        not after.above
        or all(ages(found)[entry.path] < rules.UNUSED_SECONDS for entry in kept)
        or rules.surplus(after) == 0
    )
    # No more than needed: the last one that went for room was still wanted.
    pressed = [one.entry for one in gone if one.reason == "pressure"]
    if pressed:
        assert freed - pressed[-1].bytes < rules.surplus(figures)


@pytest.mark.parametrize(
    ("marks", "is_alone"),
    [
        ({}, True),
        ({"sidecar-me": 1000.0}, True),
        ({"sidecar-me": 1000.0, "sidecar-b": 1000.0 - rules.PRESENT_SECONDS + 1}, False),
        ({"sidecar-me": 1000.0, "sidecar-b": 1000.0 - rules.PRESENT_SECONDS}, True),
        ({"sidecar-me": 1000.0, "sidecar-b": 1000.5}, False),
        ({"sidecar-me": 1000.0, "before-the-node-started": 1_000_000.0}, True),
    ],
)
def test_a_pod_is_alone_when_other_marks_are_older_than_a_restart_takes(
    marks: dict[str, float], is_alone: bool
) -> None:
    assert rules.alone(marks, "sidecar-me", 1000.0) is is_alone


def test_bytes_are_summed_by_state_and_by_top_level_entry() -> None:
    found = book(
        Entry("pool-a/owner", 4096, "owner", "w", True),
        Entry("pool-a/slot-1", 10, "leased", "w", True),
        Entry("pool-a/slot-2", 20, "released", "w", True),
        Entry("pool-a/slot-3", 30, "expired", "w", True),
        Entry("pool-b/slot-1", 40, "expired", "x", False),
        Entry("pool-b/slot-2", 50, "leased", "x", False),
        encoders("c", 60, 1),
        Entry("c/notes", 70, "other", used=(1.0, 1.0)),
    )
    assert rules.by_state(found) == {"owner": 4096, "leased": 60, "idle": 50, "expired": 40, "encoder": 60, "other": 70}
    assert rules.by_top_level(found) == {"pool-a": (4, 4156), "pool-b": (2, 90), "c": (2, 130)}
    assert sum(rules.by_state(found).values()) == found.bytes == rules.shared(found, 0, was_above=False).taken


GROUP = 65533
OTHER_USER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="not run: needs root, as the init container does")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    return folder


def has_access_as(folder: Path, user: int, group: int) -> bool:
    """Open a folder from a process of another user, which has no capability; return whether that worked."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(folder.parent)  # the folders above it belong to root alone
            os.setgroups([])
            os.setgid(group)
            os.setuid(user)
            open_folder(Path(folder.name), GROUP)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_root
def test_the_folder_and_new_files_belong_to_the_group(folder: Path) -> None:
    assert main([str(folder), str(GROUP)]) == 0
    status = folder.stat()
    assert (status.st_gid, stat.S_IMODE(status.st_mode)) == (GROUP, MODE)
    inside = folder / "made-by-root"
    inside.touch()
    assert inside.stat().st_gid == GROUP
    assert main([str(folder), str(GROUP)]) == 0  # a second pod finds it done


@needs_root
def test_an_owner_in_the_group_needs_no_capability(folder: Path) -> None:
    """What the init container is: owner of the folder and member of the group, nothing more."""
    os.chown(folder, OTHER_USER, OTHER_USER)
    assert has_access_as(folder, OTHER_USER, GROUP)
    assert (folder.stat().st_gid, stat.S_IMODE(folder.stat().st_mode)) == (GROUP, MODE)


@needs_root
def test_a_folder_of_another_user_is_an_error(folder: Path) -> None:
    assert not has_access_as(folder, OTHER_USER, GROUP)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(SharedFolderError):
        open_folder(tmp_path / "link", os.getgid())
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


def test_a_missing_folder_and_wrong_usage_have_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), "1"]) == 1
    assert "No such file or directory" in capsys.readouterr().err
    assert main(["one"]) == main(["a", "b"]) == main([]) == 2
    assert "usage: mmrouter shared-memory" in capsys.readouterr().err


def test_outside_a_cluster_an_own_folder_suffices(tmp_path: Path) -> None:
    """There the group does not exist, and everything runs as one user."""
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o700)
    open_folder(folder, os.getgid())
    assert os.access(folder, os.W_OK)
