"""Decode SGLang's KV events (docs/engine-facts/sglang.md#event-frames).

Hashes are signed 64-bit numbers. Image identity is in the token ids, as sentinels of up to 62 bits, so ids are 64 bits
wide in every event. Adjacent pages come in one event; the medium distinguishes copies of a block in several tiers. An
event that cannot be indexed becomes :class:`~mmrouter_lib.engines.base.events.Ignored`.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from mmrouter_lib.cache_layout import DEVICE
from mmrouter_lib.engines.base.events import (
    BatchDecoder,
    Cleared,
    Event,
    EventError,
    Ignored,
    Removed,
    Stored,
    WireBatch,
    checked_block_size,
    count_ids,
    lora_of,
)

_TYPECODE, _ID_BYTES = "Q", 8
_U64 = 0xFFFF_FFFF_FFFF_FFFF


Ids = TypeVar("Ids", list[Any], bytes)
"""Token ids as received, or packed into 8 bytes each (:mod:`mmrouter_lib.engines.base.events`)."""


class _Metadata(msgspec.Struct, gc=False):
    """What 0.5.19, whose events are arrays, writes in the place of the salt."""

    cache_salt: str | None = None


class _Stored(msgspec.Struct, Generic[Ids], tag_field="type", tag="BlockStored", gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Ids
    block_size: int
    lora_id: Any = None
    medium: str | None = None
    cache_salt: str | _Metadata | None = None
    session_id: Any = None
    lora_name: str | None = None


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


_WireEvent = _Stored[Any] | _Removed | _Cleared


def _events(wire: Sequence[_WireEvent | Ignored]) -> tuple[Event, ...]:
    return tuple([_event(event) for event in wire])


def _event(event: _WireEvent | Ignored) -> Event:
    if isinstance(event, _Stored):
        return _stored(event)
    if isinstance(event, _Removed):
        if not event.block_hashes:
            return Ignored("empty_remove")
        return Removed(_hashes(event.block_hashes), 0, event.medium or DEVICE)
    return Cleared() if isinstance(event, _Cleared) else event


def _stored(event: _Stored[Any]) -> Event:
    size, blocks, tokens = checked_block_size(event.block_size), len(event.block_hashes), event.token_ids
    if not blocks:
        return Ignored("empty_store")
    if blocks * size != count_ids(tokens, _ID_BYTES):
        return Ignored("ragged_store")
    if not isinstance(tokens[0], int):  # speculative EAGLE trees are keyed by pairs; packed ids are always numbers
        return Ignored("bigram_tokens")
    try:
        ids = array(_TYPECODE, tokens)
    except (OverflowError, TypeError) as error:
        raise EventError(f"token id: {error}") from error
    parent, salt = event.parent_block_hash, event.cache_salt
    return Stored(
        hashes=_hashes(event.block_hashes),
        parent=None if parent is None else parent & _U64,
        ids=ids,
        block_size=size,
        extras={},
        spans=(),
        lora=lora_of(event.lora_name, event.lora_id),
        salt=salt.cache_salt if isinstance(salt, _Metadata) else salt,
        group=0,
        medium=event.medium or DEVICE,
    )


def _hashes(values: list[int]) -> tuple[int, ...]:
    """Return signed numbers as unsigned ones with the same bits."""
    return tuple([value & _U64 for value in values])


decode_batch = BatchDecoder[_WireEvent](
    msgspec.msgpack.Decoder(WireBatch[_Stored[list[Any]] | _Removed | _Cleared]),
    msgspec.msgpack.Decoder(WireBatch[_Stored[bytes] | _Removed | _Cleared]),
    (_Stored[list[Any]], _Removed, _Cleared),
    _events,
    _ID_BYTES,
).decode
"""Decode one message of the event stream. Raises :class:`EventError`."""
