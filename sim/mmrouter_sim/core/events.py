"""KV events and their wire encoding, byte for byte as in vLLM 0.32 (docs/engine-facts/vllm.md#event-frames).

SGLang uses the same batch frame.

An event is a msgpack map with ``type`` first; fields that have a default are left out when they have it. A batch is a
msgpack array of time, events and data-parallel rank.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

PublishedHash = int | bytes

MEDIUM = "GPU"  # the same on every device (docs/engine-facts/vllm.md#devices)
FULL_ATTENTION = "full_attention"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that became cached, in chain order, after ``parent_block_hash`` (None: from the start of the prompt)."""

    block_hashes: list[PublishedHash]
    parent_block_hash: PublishedHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None  # one entry per block: None or a list
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """One physical copy of each block was evicted. The engine puts one hash into each event."""

    block_hashes: list[PublishedHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    """The rank's prefix cache was reset."""


VllmEvent = BlockStored | BlockRemoved | AllBlocksCleared
Event = msgspec.Struct
"""An event of any engine: a map with its type."""


class EventBatch(msgspec.Struct, array_like=True):
    """What one engine step published: seconds since 1970, events, rank."""

    ts: float
    events: list[VllmEvent]
    data_parallel_rank: int


_ENCODER = msgspec.msgpack.Encoder()


def encode(batch: EventBatch) -> bytes:
    """Return the payload frame of a batch."""
    return _ENCODER.encode(batch)


def encode_events(ts: float, events: Sequence[Event], rank: int) -> bytes:
    """Return the payload frame of events of any engine, in the same form."""
    return _ENCODER.encode((ts, events, rank))
