"""Block digests and KV events of an engine type: the only part of a rank that differs between engines."""

from collections.abc import Callable, Sequence
from typing import Protocol

from mmrouter_sim.core import events
from mmrouter_sim.core.events import Event, PublishedHash
from mmrouter_sim.core.hashing import Hash, first_parent, published_int, sha256_cbor
from mmrouter_sim.core.request import Chain, Request


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
        self._chain = Chain(hash_, first_parent(hash_, hash_seed), block_size)
        self._published = published

    def extend(self, request: Request) -> None:
        self._chain.extend(request)

    def stored(self, request: Request, first: int, last: int) -> Event:
        size = self._size
        return events.BlockStored(
            block_hashes=self._all(request.digests[first:last]),
            parent_block_hash=self._published(request.digests[first - 1]) if first else None,
            token_ids=list(request.ids[first * size : last * size]),
            block_size=size,
            lora_id=1 if request.lora else None,
            medium=events.MEDIUM,
            lora_name=request.lora[0] if request.lora else None,
            extra_keys=self._chain.published(request, first, last),
            group_idx=0,
            kv_cache_spec_kind=events.FULL_ATTENTION,
        )

    def removed(self, digest: bytes) -> Event:
        return events.BlockRemoved(block_hashes=[self._published(digest)], medium=events.MEDIUM, group_idx=0)

    def cleared(self) -> Event:
        return events.AllBlocksCleared()

    def joined(self, events: list[Event]) -> list[Event]:
        return events

    def _all(self, digests: Sequence[bytes]) -> list[PublishedHash]:
        return [self._published(digest) for digest in digests]
