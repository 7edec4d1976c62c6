"""The rules of the shared directory's janitor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_handover.shm import Entry, Ledger
from mmrouter_lib import feed
from mmrouter_sidecar.shared_memory.cleanup_rules import (
    FORGOTTEN_SECONDS,
    HIGH_WATER,
    LOW_WATER,
    PRESENT_SECONDS,
    UNUSED_SECONDS,
    alone,
    by_state,
    by_top_level,
    pressure,
    removals,
    shared,
    surplus,
)

NOW = 1e9
HUGE = 1 << 40


def encoders(name: str, size: int, unused: float) -> Entry:
    return Entry(f"{name}/encoder_cache.safetensors", size, "other", used=NOW - unused)


def book(*entries: Entry, capacity: int = HUGE, available: int = HUGE) -> Ledger:
    return Ledger(entries, capacity, available)


def going(found: Ledger, limit: int, *, was_above: bool = False) -> list[tuple[str, str]]:
    figures = shared(found, limit, was_above=was_above)
    return [(one.entry.path.partition("/")[0], one.reason) for one in removals(found, figures, NOW)]


def test_least_recently_used_files_are_removed_down_to_the_low_mark() -> None:
    found = book(*(encoders(name, 100, age) for name, age in (("b", 200), ("c", 150), ("a", 300), ("d", 100))))
    assert going(found, 1000) == []
    assert going(found, 500) == [("a", "pressure")]
    assert going(found, 400) == [("a", "pressure"), ("b", "pressure")]
    assert [name for name, _ in going(found, 1)] == ["a", "b", "c", "d"]


def test_recently_used_files_stay_under_any_pressure() -> None:
    found = book(encoders("young", 900, UNUSED_SECONDS - 1), encoders("old", 10, UNUSED_SECONDS))
    assert going(found, 100) == [("old", "pressure")]


def test_files_unused_for_an_hour_are_removed_without_pressure() -> None:
    found = book(encoders("old", 10, FORGOTTEN_SECONDS), encoders("young", 10, FORGOTTEN_SECONDS - 1))
    assert going(found, 10_000) == [("old", "unused")]
    assert going(found, 0) == [("old", "unused")]


def test_only_encoder_files_are_removed() -> None:
    others = (
        Entry("pool-a/slot-1", 500, "leased", "w", True),
        Entry("pool-a/plain-1", 500, "leased", "w", True),
        Entry("notes", 500, "other", used=0.0),
        Entry("a/encoder_cache.safetensors.bak", 500, "other", used=0.0),
        Entry("pool-a/slot-2", 500, "unreadable"),
    )
    assert going(book(*others), 100) == []


def test_the_space_of_the_file_system_bounds_as_the_limit_does() -> None:
    full = book(encoders("a", 100, 200), encoders("b", 100, 100), capacity=1000, available=150)
    assert pressure(full, 0) == 0.85
    assert going(full, 0) == [("a", "pressure"), ("b", "pressure")]
    # Others than us fill it: all that is ours to give goes, and no more is hoped for.
    assert surplus(shared(book(encoders("a", 10, 200), capacity=1000, available=100), 0, was_above=False)) == 10


def test_above_the_high_mark_it_stays_above_until_it_is_below_the_low_one() -> None:
    above, told = False, []
    for taken in (79, 80, 75, 70, 69, 75, 81):
        above = shared(book(encoders("a", taken, 1)), 100, was_above=above).above
        told.append(above)
    assert told == [False, True, True, True, False, False, True]
    assert (HIGH_WATER, LOW_WATER) == (0.8, 0.7)


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
    figures = shared(found, limit, was_above=False)
    gone = removals(found, figures, NOW)
    assert all(NOW - (one.entry.used or 0) >= UNUSED_SECONDS for one in gone)
    kept = [entry for entry in entries if entry not in [one.entry for one in gone]]
    freed = taken - sum(entry.bytes for entry in kept)
    after = shared(book(*kept, capacity=taken + room, available=room + freed), limit, was_above=figures.above)
    assert not after.above or all(NOW - (entry.used or 0) < UNUSED_SECONDS for entry in kept) or surplus(after) == 0
    # No more than needed: the last one that went for room was still wanted.
    pressed = [one.entry for one in gone if one.reason == "pressure"]
    if pressed:
        assert freed - pressed[-1].bytes < surplus(figures)


@pytest.mark.parametrize(
    ("marks", "is_alone"),
    [
        ({}, True),
        ({"sidecar-me": 1000.0}, True),
        ({"sidecar-me": 1000.0, "sidecar-b": 1000.0 - PRESENT_SECONDS + 1}, False),
        ({"sidecar-me": 1000.0, "sidecar-b": 1000.0 - PRESENT_SECONDS}, True),
    ],
)
def test_a_pod_is_alone_when_other_marks_are_older_than_a_restart_takes(
    marks: dict[str, float], is_alone: bool
) -> None:
    assert alone(marks, "sidecar-me", 1000.0) is is_alone


def test_bytes_are_summed_by_state_and_by_top_level_entry() -> None:
    found = book(
        Entry("pool-a/owner", 4096, "owner", "w", True),
        Entry("pool-a/slot-1", 10, "leased", "w", True),
        Entry("pool-a/slot-2", 20, "released", "w", True),
        Entry("pool-a/slot-3", 30, "expired", "w", True),
        Entry("pool-b/slot-1", 40, "expired", "x", False),
        Entry("pool-b/slot-2", 50, "leased", "x", False),
        encoders("c", 60, 1),
        Entry("c/notes", 70, "other", used=1.0),
    )
    assert by_state(found) == {"owner": 4096, "leased": 60, "idle": 50, "expired": 40, "encoder": 60, "other": 70}
    assert by_top_level(found) == {"pool-a": (4, 4156), "pool-b": (2, 90), "c": (2, 130)}
    assert sum(by_state(found).values()) == found.bytes == shared(found, 0, was_above=False).taken


def test_usage_is_a_frame_of_the_feed() -> None:
    found = book(encoders("a", 90, 1), capacity=1000, available=700)
    assert shared(found, 100, was_above=False) == feed.SharedDirectory(90, 100, 700, 1000, True)
