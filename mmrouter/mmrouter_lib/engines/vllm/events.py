"""Decode vLLM's KV events (docs/engine-facts/vllm.md#event-frames).

Hashes are 64-bit numbers or whole digests. An event that cannot be indexed becomes
:class:`~mmrouter_lib.engines.base.events.Ignored`.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import msgspec

from mmrouter_lib.block_keys import span_extra, with_lookahead
from mmrouter_lib.cache_layout import DEVICE, FULL_KINDS
from mmrouter_lib.engines.base.events import (
    BatchDecoder,
    Cleared,
    Event,
    EventError,
    Ignored,
    Offloaded,
    Ragged,
    Removed,
    Stored,
    WireBatch,
    checked_block_size,
    count_ids,
    lora_of,
)
from mmrouter_lib.media_identity import foreign_identity, from_wire

_TYPECODE, _ID_BYTES = "I", 4
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_EMBEDS_TAG = b"prompt embeddings of this block:"


Ids = TypeVar("Ids", list[int], bytes)
"""Token ids as received, or packed into 4 bytes each (:mod:`mmrouter_lib.engines.base.events`)."""


class _Stored(msgspec.Struct, Generic[Ids], tag_field="type", tag="BlockStored", gc=False):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: Ids
    block_size: int
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


_WireEvent = _Stored[Any] | _Removed | _Cleared


def _events(wire: Sequence[_WireEvent | Ignored]) -> tuple[Event, ...]:
    """Translate a batch. Engines send one removal per block; consecutive ones become one event."""
    events: list[Event] = []
    run: list[int | bytes] = []
    place = (0, "")
    for event in wire:
        if isinstance(event, _Removed) and event.locality != "REMOTE" and event.block_hashes:
            here = (event.group_idx or 0, event.medium or DEVICE)
            if run and here != place:
                events.append(Removed(_hashes(run), *place))
                run = []
            place = here
            run += event.block_hashes
            continue
        if run:
            events.append(Removed(_hashes(run), *place))
            run = []
        events.append(_stored(event) if isinstance(event, _Stored) else _event(event))
    if run:
        events.append(Removed(_hashes(run), *place))
    return tuple(events)


def _event(event: _Removed | _Cleared | Ignored) -> Event:
    if isinstance(event, _Removed):
        return Ignored("remote" if event.locality == "REMOTE" else "empty_remove")
    return Cleared() if isinstance(event, _Cleared) else event


def _stored(event: _Stored[Any]) -> Event:
    kind, group = event.kv_cache_spec_kind or "", event.group_idx or 0
    if event.locality == "REMOTE":  # another node holds the blocks
        return Ignored("remote")
    medium = event.medium or DEVICE
    if medium != DEVICE:
        # Placeholders have neither tokens nor a block size, and self-describing events lack images and salts.
        return Offloaded(_hashes(event.block_hashes), group, medium) if event.block_hashes else Ignored("empty_store")
    # A decoding engine sends an event per block, so what most events do not need costs no call here.
    size, blocks, given = checked_block_size(event.block_size), len(event.block_hashes), event.token_ids
    tokens = len(given) if type(given) is list else count_ids(given, _ID_BYTES)
    if not blocks and tokens < size:
        return Ignored("empty_store")
    try:
        ids = array(_TYPECODE, given)
    except OverflowError as error:
        raise EventError(f"token id: {error}") from error
    keys, parent, lora = event.extra_keys, event.parent_block_hash, event.lora_name
    if event.lora_id is not None:
        lora = lora_of(lora, event.lora_id)
    if keys and len(keys) != blocks:
        raise EventError(f"{len(keys)} extra_keys for {blocks} blocks")
    ahead = event.lookahead_token_ids or ()
    if ahead and len(ahead) != blocks:
        raise EventError(f"{len(ahead)} lookahead_token_ids for {blocks} blocks")
    lookahead = max(map(len, ahead)) if ahead else 0
    hashes = _hashes(event.block_hashes)
    parent_hash = None if parent is None else _narrow(parent)
    window = event.kv_cache_spec_sliding_window
    if blocks * size < tokens:
        published_extras(keys or (), lora=event.lora_name, starts_prompt=parent is None)  # raises now instead of later
        return Ragged(hashes, parent_hash, ids, size, keys, lora, group, medium, window, kind, lookahead)
    if keys and blocks * size > tokens:
        keys = keys[: tokens // size]
    extras, spans, salt = (
        published_extras(keys, lora=event.lora_name, starts_prompt=parent is None)
        if keys and any(keys)
        else ({}, (), None)
    )
    if lookahead:
        try:
            extras = with_lookahead(extras, [array(_TYPECODE, after) for after in ahead[: tokens // size]])
        except OverflowError as error:
            raise EventError(f"lookahead token id: {error}") from error
        spans = tuple([span for span in spans if span[2] < size])  # those after the block are named by theirs
    kept = None if kind in FULL_KINDS and not window else keys
    # Positional, because keyword arguments take longer.
    return Stored(
        hashes, parent_hash, ids, size, extras, spans, lora, salt, group, medium, window, kind, kept, lookahead
    )


def published_extras(
    keys: Sequence[Sequence[Any] | None], *, lora: str | None, starts_prompt: bool
) -> tuple[dict[int, bytes], tuple[tuple[int, bytes, int], ...], str | None]:
    """Return extras per block, spans and the salt from ``extra_keys`` (one list, or nil, per block).

    ``starts_prompt``: the first of these blocks is a prompt's first. Raises :class:`EventError`.

    Items of a block, in order: the LoRA name, ``[identifier, start - block start]`` per image, the cache salt (first
    block of a prompt only), the digest of prompt embeddings. They are untagged on the wire. An unexpected
    item becomes part of the block's extras, so that the block equals no predicted one.
    """
    extras: dict[int, bytes] = {}
    spans: list[tuple[int, bytes, int]] = []
    salt: str | None = None
    for number, entry in enumerate(keys):
        if not entry:
            continue
        name, raw = lora, b""
        for item in entry:
            match item:
                case [str(identifier), int(start)]:
                    identity = _identity(identifier)
                    try:
                        raw += span_extra(identity, start)
                    except OverflowError as error:
                        raise EventError(f"span start {start}") from error
                    spans.append((number, identity, start))
                case str(text) if text == name:
                    name = None  # at most once per block, before everything else
                case str(text) if starts_prompt and number == 0 and salt is None:
                    salt = text
                case str(text):
                    raw += foreign_identity(text)
                case bytes(digest):
                    raw += _EMBEDS_TAG + digest
                case _:
                    raise EventError(f"extra key of type {type(item).__name__} in block {number}")
        if raw:
            extras[number] = raw
    return extras, tuple(spans), salt


@lru_cache(maxsize=4096)
def _identity(identifier: str) -> bytes:
    """Return the identity in an identifier that the router set, or 32 bytes for a foreign one."""
    return from_wire(identifier) or foreign_identity(identifier)


def _hashes(values: list[int | bytes]) -> tuple[int, ...]:
    if values and type(values[0]) is int:
        try:
            if min(values) >= 0:  # type: ignore[operator]
                return tuple(values)  # type: ignore[arg-type]
        except TypeError:
            pass  # numbers and digests in one list: narrow one by one
    return tuple([_narrow(value) for value in values])


def _narrow(value: int | bytes) -> int:
    """Return a hash as the engine's integer form: the low 64 bits; a negative number is the same bits unsigned."""
    if isinstance(value, int):
        return value & _U64
    if len(value) < 8:
        raise EventError(f"block hash of {len(value)} bytes")
    return int.from_bytes(value[-8:], "big")


decode_batch = BatchDecoder[_WireEvent](
    msgspec.msgpack.Decoder(WireBatch[_Stored[list[int]] | _Removed | _Cleared]),
    msgspec.msgpack.Decoder(WireBatch[_Stored[bytes] | _Removed | _Cleared]),
    (_Stored[list[int]], _Removed, _Cleared),
    _events,
    _ID_BYTES,
).decode
"""Decode one message of the event stream. Raises :class:`EventError`."""
