"""KV events of all engines in one form.

Block hashes are the engine's own, as unsigned 64-bit numbers. Whole digests are narrowed to the low 64 bits, which the
same engine publishes in its integer form.
"""

from array import array
from typing import Any

import msgspec


class EventError(ValueError):
    """An event batch cannot be decoded; the message says where."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that the engine now holds, in chain order, right after ``parent`` (``None``: from the prompt's start).

    ``ids`` holds the tokens of the blocks back to back: ``array('I')``, or ``array('Q')`` from an engine that writes
    wide sentinels into them (then in every event). ``extras`` maps a block's number within this event to the bytes that
    ``mmrouter_lib.block_keys.chain`` takes for it. ``spans`` lists (block number, identity, span start - block start).
    If there are tokens for fewer blocks than hashes, they are those of the first blocks.
    """

    hashes: tuple[int, ...]
    parent: int | None
    ids: "array[int]"
    block_size: int
    extras: dict[int, bytes]
    spans: tuple[tuple[int, bytes, int], ...]
    lora: str | None
    salt: str | None
    group: int
    medium: str
    window: int | None = None  # tokens; None for full attention
    kind: str = ""  # the engine's name for the group's kind of cache, empty where it sends none
    published: Any = None  # extra keys per block as received; only with a window, where hashes are recomputed


class Ragged(msgspec.Struct, frozen=True, gc=False):
    """Tokens of more blocks than the engine holds, and the hashes of those it holds, in order, without positions.

    ``published`` has the extra keys of every hash as received, ``None`` for no entry at all; the other fields are as in
    :class:`Stored`.
    """

    hashes: tuple[int, ...]
    parent: int | None
    ids: "array[int]"
    block_size: int
    published: Any
    lora: str | None
    group: int
    medium: str
    window: int | None = None
    kind: str = ""


class Removed(msgspec.Struct, frozen=True, gc=False):
    """One physical copy of each block is gone."""

    hashes: tuple[int, ...]
    group: int
    medium: str


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The rank's cache is empty."""


class Ignored(msgspec.Struct, frozen=True, gc=False):
    """An event that is not indexed; ``reason`` is the label it is counted under.

    ``group``: the cache group, where a group that is not indexed is the reason.
    """

    reason: str
    group: int | None = None


Event = Stored | Ragged | Removed | Cleared | Ignored


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One message of an engine's event stream."""

    sent: float  # seconds since 1970, engine clock
    rank: int
    events: tuple[Event, ...]
