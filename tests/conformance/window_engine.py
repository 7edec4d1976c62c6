"""What a vLLM with a sliding window holds and hits, read from its own event history by engine hash alone.

No block key and no code of a sidecar or router takes part, so that both are compared with something else. A prompt's
hashes are computed with the simulator's form of vLLM's rule (docs/engine-facts/vllm.md#block-hashes).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from mmrouter_sim.core import requests as sim


class WindowEngine:
    """One cache group with a window: the copies of every engine hash that it holds."""

    def __init__(self, window: int, block_size: int) -> None:
        self.block_size = block_size
        self.needed = -(-(window - 1) // block_size)
        self.copies: Counter[int] = Counter()
        self.published = self.removed = self.ragged = self.empty = self.orphans = 0
        """Hashes stored and removed; events that name fewer blocks than they have tokens, and none of them; events
        whose parent was never stored."""
        self.groups: set[tuple[int, str, int | None]] = set()
        self._stored: set[int] = set()

    def apply(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            kind, hashes = event["type"], event.get("block_hashes", [])
            if kind == "BlockStored":
                self._store(event, hashes)
            elif kind == "BlockRemoved":
                self.copies.subtract(hashes)
                self.removed += len(hashes)
            else:
                self.copies.clear()
        assert min(self.copies.values(), default=0) >= 0

    def _store(self, event: dict[str, Any], hashes: Sequence[int]) -> None:
        self.groups.add((event["group_idx"], event["kv_cache_spec_kind"], event["kv_cache_spec_sliding_window"]))
        parent = event["parent_block_hash"]
        self.orphans += parent is not None and parent not in self._stored
        named = len(hashes) * event["block_size"]
        self.ragged += named < len(event["token_ids"])
        self.empty += not hashes
        self.published += len(hashes)
        self.copies.update(hashes)
        self._stored.update(hashes)

    def hit(self, ids: Sequence[int], media: Sequence[sim.Media]) -> int:
        """Return the tokens that a request finds: the rightmost run of ``needed`` blocks, else the run from block 0."""
        size = self.block_size
        held = [self.copies[number] > 0 for number in hashes_of(ids, media, size)[: (len(ids) - 1) // size]]
        ends = (end for end in range(len(held), 0, -1) if all(held[max(0, end - self.needed) : end]))
        return next(ends, 0) * size


def hashes_of(ids: Sequence[int], media: Sequence[sim.Media], size: int) -> list[int]:
    parent, hashes = sim.first_parent(sim.sha256_cbor, sim.SEED), []
    for start in range(0, len(ids) // size * size, size):
        keys = sim.extra_keys(start, start + size, media)
        parent = sim.block_hash(sim.sha256_cbor, parent, ids[start : start + size], keys)
        hashes.append(sim.published_int(parent))
    return hashes
