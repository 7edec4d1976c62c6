"""KV events and their wire encoding, byte for byte as in vLLM 0.32 (docs/engine-facts/vllm.md#event-frames).

An event is a msgpack map with ``type`` first; fields that have a default are left out when they have it. A batch is a
msgpack array of time, events and data-parallel rank. SGLang's are of the same form.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import Any

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
    """One physical copy of each block was evicted. vLLM puts one hash into each event."""

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


class Dialect(ABC):
    """Digests of one engine's blocks and the events about them. ``single``: a block is held only once, and generated
    blocks become findable when their request ends.
    """

    def __init__(self, block_size: int, *, published: Callable[[bytes], PublishedHash], single: bool = False) -> None:
        self._size, self._published, self.single = block_size, published, single

    def extend(self, request: Request) -> None:
        """Append the digests of the request's new full blocks."""
        size = self._size
        for number in range(len(request.digests), len(request.ids) // size):
            request.digests.append(self.digest(request, number, request.ids[number * size : (number + 1) * size]))

    @abstractmethod
    def digest(self, request: Request, number: int, ids: "array[int]") -> bytes:
        """Return the digest of a block of a request, whose blocks before have theirs."""

    @abstractmethod
    def stored(self, request: Request, first: int, last: int) -> Event:
        """Return the event about blocks [first, last) of a request."""

    def _fields(self, request: Request, first: int, last: int) -> dict[str, Any]:
        """Return the fields that the events of both engines have."""
        return {
            "block_hashes": [self._published(digest) for digest in request.digests[first:last]],
            "parent_block_hash": self._published(request.digests[first - 1]) if first else None,
            "token_ids": request.ids[first * self._size : last * self._size].tolist(),
            "block_size": self._size,
            "medium": MEDIUM,
        }

    def removed(self, digest: bytes) -> BlockRemoved:
        """Return the event about one evicted copy."""
        return BlockRemoved([self._published(digest)], MEDIUM)

    def joined(self, events: list[Event]) -> list[Event]:
        """Return the events of one step as they are published."""
        return events


class VllmDialect(Dialect):
    """vLLM: hashes over CBOR or pickle, media named beside the token ids (docs/engine-facts/vllm.md#event-frames)."""

    def __init__(
        self,
        block_size: int,
        *,
        hash_: Hash = sha256_cbor,
        hash_seed: str | None = None,
        published: Callable[[bytes], PublishedHash] = published_int,
    ) -> None:
        super().__init__(block_size, published=published)
        self._hash, self._first_parent = hash_, first_parent(hash_, hash_seed)

    def digest(self, request: Request, number: int, ids: "array[int]") -> bytes:
        parent = request.digests[-1] if request.digests else self._first_parent
        return block_hash(self._hash, parent, ids, self._keys(request, number))

    def stored(self, request: Request, first: int, last: int) -> BlockStored:
        return BlockStored(
            **self._fields(request, first, last),
            lora_id=request.lora.number if request.lora else None,
            lora_name=request.lora.name if request.lora else None,
            extra_keys=[published_keys(self._keys(request, number)) for number in range(first, last)],
            group_idx=0,
            kv_cache_spec_kind=FULL_ATTENTION,
        )

    def removed(self, digest: bytes) -> BlockRemoved:
        return msgspec.structs.replace(super().removed(digest), group_idx=0)

    def _keys(self, request: Request, number: int) -> tuple[ExtraKey, ...]:
        start, end = number * self._size, (number + 1) * self._size
        return extra_keys(start, end, request.media, salt=request.salt, lora=request.lora)
