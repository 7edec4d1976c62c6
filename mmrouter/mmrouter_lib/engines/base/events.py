"""KV events of all engines in one form, and their frame: a msgpack array ``[ts, events, data parallel rank]``.

Block hashes are the engine's own, as unsigned 64-bit numbers. Whole digests are narrowed to the low 64 bits, which the
same engine publishes in its integer form.

Current releases send each event as a map that names its type; older ones send positional arrays in the same order of
fields. Unknown fields are skipped. Most of a payload is token ids, one msgpack integer each. The compiled extension
(:mod:`mmrouter_lib.native`), where installed, first packs them into bytes, so that no Python object is created per
token. Payloads that it does not accept are decoded in Python, which also raises all errors.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, get_origin

import msgspec

from mmrouter_lib import native


class EventError(ValueError):
    """An event batch cannot be decoded; the message says where."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that the engine now holds, in chain order, right after ``parent`` (``None``: from the prompt's start).

    ``ids`` holds the tokens of the blocks back to back: ``array('I')``, or ``array('Q')`` from an engine that writes
    wide sentinels into them (then in every event). ``extras`` maps a block's number within this event to the bytes that
    ``mmrouter_lib.block_keys.chain`` takes for it. ``spans`` lists (block number, identity, span start - block start).
    If there are tokens for fewer blocks than hashes, they are those of the first blocks. ``lookahead``: tokens after
    each block that its hash covers too; their ids and the images among them are in ``extras`` alone.
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
    published: Any = None  # extra keys per block as received; not of full attention, as hashes of others are recomputed
    lookahead: int = 0


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
    lookahead: int = 0


class Offloaded(msgspec.Struct, frozen=True, gc=False):
    """A copy of each block is in a lower tier. What the blocks contain is in earlier events of the same hashes."""

    hashes: tuple[int, ...]
    group: int
    medium: str


class Removed(msgspec.Struct, frozen=True, gc=False):
    """One physical copy of each block is gone."""

    hashes: tuple[int, ...]
    group: int
    medium: str


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The rank's cache is empty."""


class Ignored(msgspec.Struct, frozen=True, gc=False):
    """An event that is not indexed, counted under ``reason``."""

    reason: str


Event = Stored | Ragged | Offloaded | Removed | Cleared | Ignored


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One message of an engine's event stream."""

    sent: float  # seconds since 1970, engine clock
    rank: int
    events: tuple[Event, ...]


E = TypeVar("E", bound=msgspec.Struct)

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError)
"""What msgspec raises for bytes that are no batch; invalid UTF-8 and unhashable map keys raise their own types."""


class WireBatch(msgspec.Struct, Generic[E], array_like=True):
    """One message with events of an engine's own types."""

    ts: float
    events: list[E]
    rank: int | None = None


MAX_BLOCK_SIZE = 2**31 - 1  # tokens; far above any engine's, and within the compiled extension's numbers

_untyped = msgspec.msgpack.Decoder(WireBatch[Any])


def lora_of(name: str | None, number: Any) -> str | None:
    """Return an adapter's name. Its number is a counter of the engine process: it stays distinct from every name."""
    return f"\0lora_id:{number}" if name is None and number is not None else name


def checked_block_size(size: int) -> int:
    """Return a block size in tokens. Raises :class:`EventError` where no engine has such blocks."""
    if not 0 < size <= MAX_BLOCK_SIZE:
        raise EventError(f"block size {size} is not in 1 to {MAX_BLOCK_SIZE}")
    return size


def count_ids(ids: list[Any] | bytes, id_bytes: int) -> int:
    """Return the number of token ids of an event, as a list or packed."""
    return len(ids) // id_bytes if type(ids) is bytes else len(ids)


class BatchDecoder(Generic[E]):
    """Decodes one engine's messages."""

    def __init__(
        self,
        typed: msgspec.msgpack.Decoder[WireBatch[E]],
        packed: msgspec.msgpack.Decoder[WireBatch[E]],
        shapes: Sequence[type[E]],
        translate: Callable[[Sequence[E | Ignored]], tuple[Event, ...]],
        id_bytes: int,
    ) -> None:
        """``typed`` decodes events of all ``shapes``, which are tagged by their types; ``packed`` does so where token
        ids are bytes, ``id_bytes`` each. ``translate`` converts them to the common events.
        """
        self._read, self._read_packed, self._translate = typed.decode, packed.decode, translate
        self._shapes = {(get_origin(shape) or shape).__struct_config__.tag: shape for shape in shapes}
        self._id_bytes = id_bytes

    def decode(self, payload: bytes) -> Batch:
        """Read one message. Raises :class:`EventError`."""
        pack = native.pack_token_ids
        if pack is not None and (packed := pack(payload, self._id_bytes)) is not None:
            try:
                wire = self._read_packed(packed)
            except _UNREADABLE:
                pass  # the error is raised below, for the payload as it came
            else:
                return Batch(wire.ts, wire.rank or 0, self._translate(wire.events))
        try:
            wire = self._read(payload)
        except msgspec.ValidationError:
            # Positional events, event types of later releases, or invalid bytes: the slow path distinguishes them.
            return self._decode_slowly(payload)
        except _UNREADABLE as error:
            raise EventError(f"not msgpack: {error}") from error
        return Batch(wire.ts, wire.rank or 0, self._translate(wire.events))

    def _decode_slowly(self, payload: bytes) -> Batch:
        try:
            wire = _untyped.decode(payload)
        except _UNREADABLE as error:
            raise EventError(f"not an event batch: {error}") from error
        named: list[E | Ignored] = []
        for number, raw in enumerate(wire.events):
            try:
                named.append(self._named(raw))
            except (msgspec.ValidationError, EventError) as error:
                raise EventError(f"event {number}: {error}") from error
        return Batch(wire.ts, wire.rank or 0, self._translate(named))

    def _named(self, raw: Any) -> E | Ignored:
        """Return a typed event from its map or positional form."""
        if isinstance(raw, dict):
            kind = raw.get("type")
        elif isinstance(raw, list) and raw:
            kind = raw[0]
        else:
            raise EventError(f"neither a map nor a positional array: {type(raw).__name__}")
        if not isinstance(kind, str):
            raise EventError("the type of an event is not text")
        shape = self._shapes.get(kind)
        if shape is None:
            return Ignored("unknown_event")
        if isinstance(raw, list):
            # Fields were only ever appended, so the order of the map is the order of the older arrays.
            raw = dict(zip((get_origin(shape) or shape).__struct_fields__, raw[1:], strict=False))
        return msgspec.convert(raw | {"type": kind}, shape)
