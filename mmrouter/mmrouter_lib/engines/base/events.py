"""Engine events in one shape, whatever engine and encoding they came from.

Block hashes are the engine's own, as unsigned 64-bit numbers: engines that publish whole digests are narrowed to the
low 64 bits, which is what the same engine publishes in its integer form.
"""

from array import array
from typing import Any

import msgspec


class EventError(ValueError):
    """An event batch cannot be read; the message says where."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that the engine now holds, in chain order, right after ``parent`` (``None``: from the prompt's start).

    ``ids`` holds the tokens of the blocks back to back: ``array('I')``, or ``array('Q')`` from an engine that puts wide
    sentinels into them (then in every event). ``extras`` maps a block's number within this event to the bytes that
    ``mmrouter_lib.block_keys.chain`` wants for it. ``spans`` lists (block number, identity, span start - block
    start). Tokens
    of fewer blocks than there are hashes are those of the first ones, and nothing is said of the others.
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
    kind: str = ""  # what the engine calls the group's cache; empty where it does not say
    published: Any = None  # extra keys per block as they came; only with a window, where hashes are recomputed


class Ragged(msgspec.Struct, frozen=True, gc=False):
    """Tokens of more blocks than are now held, and the hashes of those that are, in order; which ones is not said.

    ``published`` has the extra keys of every hash as they came, ``None`` for no entry at all; the rest is as in
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
    """The rank holds nothing any more."""


class Ignored(msgspec.Struct, frozen=True, gc=False):
    """An event that changes nothing for us, and the reason it is counted under.

    ``group``: the cache group of which nothing is indexed, where that is the reason.
    """

    reason: str
    group: int | None = None


Event = Stored | Ragged | Removed | Cleared | Ignored


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One message of an engine's event stream."""

    sent: float  # seconds since 1970, engine clock
    rank: int
    events: tuple[Event, ...]
