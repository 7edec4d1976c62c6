"""Rules of the shared directory's janitor: how full the directory is, and which files must be removed. Pure."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from mmrouter_handover.shm import Entry, Ledger
from mmrouter_lib import feed

HIGH_WATER = 0.8
"""Used share of the limit or the file system above which encoder files are removed. Writers stop at 0.9."""
LOW_WATER = 0.7  # used share down to which they are removed
ENCODER_FILE = "encoder_cache.safetensors"
"""File name of an image's embedding in vLLM's ECExampleConnector, which never removes one."""
UNUSED_SECONDS = 60.0  # a file that was used within this time may belong to a request in flight, and is never removed
FORGOTTEN_SECONDS = 3600.0  # a file unused for this long is removed even without pressure, to free the node's memory
PRESENT_SECONDS = 360.0
"""How long a pod is present after its last mark: the kubelet restarts a container within five minutes."""

FUTURE_SECONDS = 60.0  # more than two processes of a node can differ, or a mark can be shown before it has its time

Reason = Literal["dead_writer", "unused", "pressure", "left_behind"]
"""``dead_writer``: a file of a dead writer. ``unused``: an encoder's file, unused for an hour. ``pressure``: the least
recently used encoder file when room was needed. ``left_behind``: any file when the node had no pod that uses it."""


class Removal(NamedTuple):
    """A file to remove, and the reason."""

    entry: Entry
    reason: Reason


def shared(book: Ledger, limit: int, *, was_above: bool) -> feed.SharedDirectory:
    """Return the usage of the directory. ``limit``: its bytes, 0 if only the file system bounds it.

    Once ``above`` the high-water mark, it stays so until usage is below the low one.
    """
    above = pressure(book, limit) >= (LOW_WATER if was_above else HIGH_WATER)
    return feed.SharedDirectory(book.bytes, limit, book.available_bytes, book.capacity_bytes, above)


def pressure(book: Ledger, limit: int) -> float:
    """Return the used share of the limit or of the file system, whichever is higher."""
    return max(book.pressure, book.bytes / limit if limit else 0.0)


def encoders_files(book: Ledger) -> dict[str, tuple[float, float]]:
    """Return path -> when it was read and written, in seconds since 1970, of each embedding written by an encoder."""
    return {entry.path: entry.used or (0.0, 0.0) for entry in book.entries if is_encoders(entry)}


def removals(book: Ledger, figures: feed.SharedDirectory, ages: Mapping[str, float]) -> list[Removal]:
    """Return the encoder files to remove, least recently used first. ``ages``: path -> seconds unused, of each."""
    candidates = [entry for entry in book.entries if is_encoders(entry)]
    candidates.sort(key=lambda entry: (-ages[entry.path], entry.path))
    wanted = surplus(figures)
    chosen: list[Removal] = []
    for entry in candidates:
        unused = ages[entry.path]
        if unused < UNUSED_SECONDS:
            break
        if unused >= FORGOTTEN_SECONDS:
            chosen.append(Removal(entry, "unused"))
        elif wanted > 0:
            chosen.append(Removal(entry, "pressure"))
        else:
            break
        wanted -= entry.bytes
    return chosen


def surplus(figures: feed.SharedDirectory) -> int:
    """Return how many bytes to remove from a directory above the high-water mark to reach the low one."""
    if not figures.above:
        return 0
    over_limit = figures.taken - LOW_WATER * figures.limit if figures.limit else 0.0
    over_space = (1 - LOW_WATER) * figures.capacity - figures.available
    return int(max(over_limit, min(over_space, figures.taken)))


def is_encoders(entry: Entry) -> bool:
    """Whether a file is an embedding written by an encoder."""
    return entry.state == "other" and entry.path.rpartition("/")[2] == ENCODER_FILE


def present(marks: Mapping[str, float], now: float) -> set[str]:
    """Return the pods that use the directory. ``marks``: pod -> time of its last mark, by a clock that starts with the
    node: a mark from the future is of an earlier start.
    """
    return {pod for pod, heard in marks.items() if -FUTURE_SECONDS <= now - heard < PRESENT_SECONDS}


def alone(marks: Mapping[str, float], own: str, now: float) -> bool:
    """Whether no other pod of the node uses the directory."""
    return present(marks, now) <= {own}


def by_state(book: Ledger) -> dict[str, int]:
    """Return the bytes of each state. Slots that a living writer keeps for reuse are ``idle``."""
    totals: dict[str, int] = {}
    for entry in book.entries:
        idle = entry.lives and entry.state in ("acknowledged", "released", "expired")
        state = "encoder" if is_encoders(entry) else "idle" if idle else entry.state
        totals[state] = totals.get(state, 0) + entry.bytes
    return totals


def by_top_level(book: Ledger) -> dict[str, tuple[int, int]]:
    """Return the number and bytes of files below each top-level entry."""
    totals: dict[str, tuple[int, int]] = {}
    for entry in book.entries:
        name = entry.path.partition("/")[0]
        number, size = totals.get(name, (0, 0))
        totals[name] = number + 1, size + entry.bytes
    return totals
