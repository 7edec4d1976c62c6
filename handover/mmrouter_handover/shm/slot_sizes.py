"""How large a slot is, and which idle slots make room for another one."""

from collections.abc import Sequence

PAGE_BYTES = 4096
"""The header's part of a slot file; the payload begins after it, aligned for every dtype and every transport."""
HEADER_BYTES = 512
"""What of the first page is written; the rest stays untouched, because every cache line costs."""
MIN_CLASS_BYTES = 1 << 16


def size_class(length: int) -> int:
    """Return the payload bytes of the slot for ``length`` bytes: the next power of two, at least 64 KiB."""
    return max(MIN_CLASS_BYTES, 1 << (length - 1).bit_length() if length else 0)


def slot_bytes(length: int) -> int:
    """Return the size of the slot's file."""
    return PAGE_BYTES + size_class(length)


def file_bytes(length: int) -> int:
    """Return the memory that a file of ``length`` bytes takes: whole pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def evictions(idle: Sequence[int], free: int, wanted: int) -> list[int] | None:
    """Return which idle slots (places in ``idle``, a list of file sizes) to give up so that ``wanted`` bytes are free.

    ``free``: bytes that are free already. The largest go first, so that few go. ``None``: not even all of them suffice.
    """
    chosen: list[int] = []
    for place in sorted(range(len(idle)), key=lambda place: (-idle[place], place)):
        if free >= wanted:
            break
        chosen.append(place)
        free += idle[place]
    return chosen if free >= wanted else None
