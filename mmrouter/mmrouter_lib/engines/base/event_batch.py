"""Decode the frame of both engines' KV events: a msgpack array ``[ts, events, data parallel rank]``.

Current releases send each event as a map that names its type; older ones send positional arrays in the same order of
fields. Unknown fields are skipped.

Most of a payload is token ids, one msgpack integer each. The compiled extension (:mod:`mmrouter_lib.native`), where
installed, first packs them into bytes, so that no Python object is created per token. Payloads that it does not accept
are decoded in Python, which also raises all errors.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, get_origin

import msgspec

from mmrouter_lib import native
from mmrouter_lib.engines.base.events import Batch, Event, EventError, Ignored

E = TypeVar("E", bound=msgspec.Struct)

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError)
"""What msgspec raises for bytes that are no batch; invalid UTF-8 and unhashable map keys raise their own types."""


class WireBatch(msgspec.Struct, Generic[E], array_like=True):
    """One message with events of an engine's own types."""

    ts: float
    events: list[E]
    rank: int | None = None


class _AnyBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    rank: int | None = None


_untyped = msgspec.msgpack.Decoder(_AnyBatch)


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
