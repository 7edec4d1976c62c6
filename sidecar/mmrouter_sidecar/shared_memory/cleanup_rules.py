"""What the janitor of a node's shared directory decides: how full it is, and which files of others have to go. Pure."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from mmrouter_handover.shm import Entry, Ledger
from mmrouter_lib import feed

HIGH_WATER = 0.8
"""Share, of the limit or of the file system, from which on the directory counts as too full. Writers stop at 0.9."""
LOW_WATER = 0.7
"""Share below which it does not any more, and down to which files of others are removed."""
ENCODER_FILE = "encoder_cache.safetensors"
"""What vLLM's ECExampleConnector calls the embedding of an image, in a folder named by the image. It removes none."""
UNUSED_SECONDS = 60.0
"""A file that was written or read within this time may be the one that a request in flight names: it stays, always."""
FORGOTTEN_SECONDS = 3600.0
"""One that was not for this long goes, also where there is room: its memory is the node's."""
PRESENT_SECONDS = 360.0
"""For how long a pod counts as there after its janitor was last heard of: a container that ends is started again after
at most five minutes."""

Reason = Literal["dead_writer", "unused", "pressure", "left_behind"]
"""``dead_writer``: what a writer that is dead left. ``unused``: an encoder's file that nobody used for an hour.
``pressure``: one that was not used for longer than others when room was needed. ``left_behind``: whatever it was, when
no pod of the node was there."""


class Doomed(NamedTuple):
    """A file that has to go, and why."""

    entry: Entry
    reason: Reason


def shared(book: Ledger, limit: int, *, was_above: bool) -> feed.SharedDirectory:
    """Return how full the directory is. ``limit``: bytes that it may hold, 0 where only the file system bounds it.

    Once it is above the high-water mark, it stays so until it is below the low one.
    """
    above = pressure(book, limit) >= (LOW_WATER if was_above else HIGH_WATER)
    return feed.SharedDirectory(book.bytes, limit, book.available_bytes, book.capacity_bytes, above)


def pressure(book: Ledger, limit: int) -> float:
    """Return the share that is taken, of the limit or of the file system, whichever is more."""
    return max(book.pressure, book.bytes / limit if limit else 0.0)


def doomed(book: Ledger, figures: feed.SharedDirectory, now: float) -> list[Doomed]:
    """Return the encoders' files that go, those that were not used for longest first. ``now``: seconds since 1970."""
    held = [entry for entry in book.entries if is_encoders(entry)]
    held.sort(key=lambda entry: (entry.used or 0.0, entry.path))
    wanted = surplus(figures)
    found: list[Doomed] = []
    for entry in held:
        unused = now - (entry.used or 0.0)
        if unused < UNUSED_SECONDS:
            break
        if unused >= FORGOTTEN_SECONDS:
            found.append(Doomed(entry, "unused"))
        elif wanted > 0:
            found.append(Doomed(entry, "pressure"))
        else:
            break
        wanted -= entry.bytes
    return found


def surplus(figures: feed.SharedDirectory) -> int:
    """Return how many bytes have to go until a directory that is above its mark is below the low one."""
    if not figures.above:
        return 0
    over_limit = figures.taken - LOW_WATER * figures.limit if figures.limit else 0.0
    over_space = (1 - LOW_WATER) * figures.capacity - figures.available
    return int(max(over_limit, min(over_space, figures.taken)))


def is_encoders(entry: Entry) -> bool:
    """Whether a file is an embedding that an encoder left for others."""
    return entry.state == "other" and entry.path.rpartition("/")[2] == ENCODER_FILE


def present(marks: Mapping[str, float], now: float) -> set[str]:
    """Return the pods that use the directory. ``marks``: pod -> when its janitor was last heard of."""
    return {pod for pod, heard in marks.items() if now - heard < PRESENT_SECONDS}


def alone(marks: Mapping[str, float], own: str, now: float) -> bool:
    """Whether no other pod of the node uses the directory."""
    return present(marks, now) <= {own}


def by_state(book: Ledger) -> dict[str, int]:
    """Return the bytes of each state. What idle writers keep for later is ``idle``, whatever its last lease came to."""
    found: dict[str, int] = {}
    for entry in book.entries:
        state = "encoder" if is_encoders(entry) else _state(entry)
        found[state] = found.get(state, 0) + entry.bytes
    return found


def _state(entry: Entry) -> str:
    if entry.lives and entry.state in ("acknowledged", "released", "expired"):
        return "idle"
    return entry.state


def by_place(book: Ledger) -> dict[str, tuple[int, int]]:
    """Return how many files, and bytes, there are in each thing that lies in the directory itself."""
    found: dict[str, tuple[int, int]] = {}
    for entry in book.entries:
        name = entry.path.partition("/")[0]
        number, size = found.get(name, (0, 0))
        found[name] = number + 1, size + entry.bytes
    return found
