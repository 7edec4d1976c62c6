"""KV events and their wire encoding, byte for byte as in vLLM 0.32 (docs/engine-facts/vllm.md#event-frames).

SGLang uses the same batch frame.

An event is a msgpack map with ``type`` first; fields that have a default are left out when they have it. A batch is a
msgpack array of time, events and data-parallel rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from mmrouter_sim.core.requests import (
    ExtraKey,
    Hash,
    Request,
    block_hash,
    extra_keys,
    first_parent,
    published_int,
    published_keys,
    sha256_cbor,
)

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


Event = msgspec.Struct
"""An event of any engine: a map with its type."""


_ENCODER = msgspec.msgpack.Encoder()


def encode_events(ts: float, events: Sequence[Event], rank: int) -> bytes:
    """Return the payload frame of what one engine step published: seconds since 1970, events, rank."""
    return _ENCODER.encode((ts, events, rank))


class Dialect(Protocol):
    """Digests of blocks and the events about them."""

    single: bool
    """Whether a block is held only once, and generated blocks become findable when their request ends."""

    def extend(self, request: Request) -> None:
        """Append the digests of the request's new full blocks."""

    def stored(self, request: Request, first: int, last: int) -> Event:
        """Return the event about blocks [first, last) of a request."""

    def removed(self, digest: bytes) -> Event:
        """Return the event about one evicted copy."""

    def cleared(self) -> Event:
        """Return the event about an emptied cache."""

    def joined(self, events: list[Event]) -> list[Event]:
        """Return the events of one step as they are published."""


class VllmDialect:
    """vLLM: hashes over CBOR or pickle, media named beside the token ids (docs/engine-facts/vllm.md#event-frames)."""

    single = False

    def __init__(
        self,
        block_size: int,
        *,
        hash_: Hash = sha256_cbor,
        hash_seed: str | None = None,
        published: Callable[[bytes], PublishedHash] = published_int,
    ) -> None:
        self._size = block_size
        self._hash, self._first_parent = hash_, first_parent(hash_, hash_seed)
        self._published = published

    def extend(self, request: Request) -> None:
        size = self._size
        for number in range(len(request.digests), len(request.ids) // size):
            parent = request.digests[-1] if request.digests else self._first_parent
            ids = request.ids[number * size : (number + 1) * size]
            request.digests.append(block_hash(self._hash, parent, ids, self._keys(request, number)))

    def _keys(self, request: Request, number: int) -> tuple[ExtraKey, ...]:
        start, end = number * self._size, (number + 1) * self._size
        return extra_keys(start, end, request.media, salt=request.salt, lora=request.lora)

    def stored(self, request: Request, first: int, last: int) -> Event:
        size = self._size
        return BlockStored(
            block_hashes=[self._published(digest) for digest in request.digests[first:last]],
            parent_block_hash=self._published(request.digests[first - 1]) if first else None,
            token_ids=list(request.ids[first * size : last * size]),
            block_size=size,
            lora_id=1 if request.lora else None,
            medium=MEDIUM,
            lora_name=request.lora[0] if request.lora else None,
            extra_keys=[published_keys(self._keys(request, number)) for number in range(first, last)],
            group_idx=0,
            kv_cache_spec_kind=FULL_ATTENTION,
        )

    def removed(self, digest: bytes) -> Event:
        return BlockRemoved(block_hashes=[self._published(digest)], medium=MEDIUM, group_idx=0)

    def cleared(self) -> Event:
        return AllBlocksCleared()

    def joined(self, events: list[Event]) -> list[Event]:
        return events
