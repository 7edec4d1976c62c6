"""Helpers of the hand-over's tests, some also used outside: crashes, byte counts, a clock, packed items, chats."""

import copy
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from mmrouter_handover.plugin.wire import PackedItem
from mmrouter_handover.shm import HandOverError, Lease, Pool

T = TypeVar("T")
TMPFS = Path("/dev/shm")
SETTINGS, NAME = "settings of both", "m1-a"
"""Of packed items."""


class Clock:
    """A monotonic clock that the test sets, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def shared_root() -> Iterator[Path]:
    """Make an empty root folder, on tmpfs where the machine has one."""
    parent = TMPFS if os.access(TMPFS, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="mmrouter-handover-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def bytes_below(root: Path) -> int:
    """Return the bytes of all files below a folder, as the kernel counts them."""
    return sum(
        os.lstat(os.path.join(folder, name)).st_blocks * 512 for folder, _, names in os.walk(root) for name in names
    )


def crash_pool(pool: Pool, drafts: Iterable[Lease] = ()) -> None:
    """Close the file descriptors of a pool without cleaning up, as SIGKILL does.

    ``drafts`` are leases that were not published: their buffers keep the mapping and its lock, so they go too.
    """
    for draft in drafts:
        draft.buffer.release()
    pool.abandon()


def trim(pool: Pool) -> None:
    """Remove all idle slots: those that are idle since the call before."""
    pool.trim_unused()
    pool.trim_unused()


def outcome(call: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of a call, and the reason if it raised :class:`HandOverError`."""
    try:
        return call(), ""
    except HandOverError as error:
        return None, error.reason


def without_bytes(body: Mapping[str, Any], held: Collection[str]) -> dict[str, Any]:
    """Return a chat whose images of these identities are named by ``uuid`` alone, as for an engine that holds them."""
    chat: dict[str, Any] = copy.deepcopy(dict(body))
    for part in (part for message in chat["messages"] for part in message["content"] if isinstance(part, dict)):
        if part.get("uuid") in held:
            part["image_url"] = None
    return chat


def written(item: PackedItem) -> bytearray:
    """Write an item to memory with other content."""
    out = bytearray(b"\xee" * item.length)
    item.write(memoryview(out))
    return out


def refusal(call: Callable[[], object]) -> str:
    """Return the reason with which a call fails, or empty."""
    return outcome(call)[1]
