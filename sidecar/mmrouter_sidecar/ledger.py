"""What one engine holds: engine hash -> (block key, copies), per rank, group and medium. Pure; no I/O.

Engines store one hash once per physical copy and remove it as often, so copies are counted. The ledger turns batches of
engine events into net changes of block keys, and into the operations that a journal needs to rebuild it. A block whose
key cannot be known (its parent is not known, its size is not the group's) is put aside and counted under its reason: it
is never published, but its copies are counted, so that they are right once its key is learned.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from mmrouter.blocks import Key, chain, pack_keys, unpack_keys
from mmrouter.engines.events import Batch, Cleared, Ignored, Removed, Stored
from mmrouter.feed import Sighting
from mmrouter_sidecar.cache import Cache

MAX_SEEN = 65_536
"""Image identities remembered so that each is sighted once."""


class Place(NamedTuple):
    """Where blocks are: one data parallel rank, cache group and medium."""

    rank: int
    group: int
    medium: str


class Op(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step that changed the ledger; replaying all of them rebuilds it. Hashes and keys are packed 8-byte numbers.

    ``add``: one copy of each hash, with its key. ``aside``: one copy of each, without a key. ``drop``: one copy of each
    less. ``clear``: the whole rank.
    """

    kind: str
    rank: int
    group: int = 0
    medium: str = ""
    hashes: bytes = b""
    keys: bytes = b""
    block_size: int = 0
    shareable: bool = False


class Change(NamedTuple):
    """Net change of one place since the last :meth:`Ledger.take`; ``stored`` and ``removed`` are disjoint."""

    place: Place
    stored: "array[int]"
    removed: "array[int]"
    cleared: bool


class Taken(NamedTuple):
    """Everything since the last take: net changes, the operations behind them, images seen for the first time."""

    changes: list[Change]
    ops: list[Op]
    sightings: list[Sighting]


class Ledger:
    """All places of one engine. ``counts`` counts, by reason, what was not indexed as it came."""

    def __init__(self, seed_of: Callable[[str | None, str | None], Key]) -> None:
        """``seed_of(lora, salt)`` returns the seed of a chain (``mmrouter.blocks.namespace_seed``)."""
        self.caches: dict[Place, Cache] = {}
        self.counts: Counter[str] = Counter()
        self._seed_of = seed_of
        self._seeds: dict[tuple[str | None, str | None], Key] = {}
        self._cleared: set[int] = set()
        self._ops: list[Op] = []
        self._sightings: list[Sighting] = []
        self._seen: dict[bytes, Sighting] = {}

    @property
    def held(self) -> int:
        """Distinct block keys held, over all places."""
        return sum(cache.held for cache in self.caches.values())

    @property
    def aside(self) -> int:
        """Hashes held whose key is not known."""
        return sum(len(cache.aside) for cache in self.caches.values())

    @property
    def block_size(self) -> int:
        """Tokens per block of group 0, 0 until the engine stored something."""
        return next((cache.block_size for place, cache in self.caches.items() if place.group == 0), 0)

    @property
    def sighted(self) -> tuple[Sighting, ...]:
        """Sightings of the present epoch that are still remembered, oldest first."""
        return tuple(self._seen.values())

    @property
    def dirty(self) -> bool:
        """Whether :meth:`take` would return anything."""
        return bool(self._ops or self._sightings or self._cleared)

    def apply(self, batch: Batch, rank: int) -> None:
        """Apply one batch of the engine rank whose stream it came from, in order."""
        if batch.rank != rank:
            self.counts["rank_mismatch"] += 1
        for event in batch.events:
            if isinstance(event, Stored):
                self._store(rank, event)
            elif isinstance(event, Removed):
                self._remove(rank, event)
            elif isinstance(event, Cleared):
                self.counts["cleared"] += 1
                self.clear(rank)
            else:
                self.counts[_reason(event)] += 1

    def clear(self, rank: int) -> None:
        """Empty one rank: its cache was cleared, or what we know of it is not proved any more."""
        mine = [place for place in self.caches if place.rank == rank]
        if any(self.caches[place].blocks or self.caches[place].removed for place in mine):
            self._cleared.add(rank)
        if mine:
            self._ops.append(Op("clear", rank))
        for place in mine:
            self.caches[place] = Cache(block_size=self.caches[place].block_size)

    def reset(self) -> None:
        """Forget everything, with what was not taken yet: a new epoch begins empty."""
        self.caches.clear()
        self._cleared.clear()
        self._ops.clear()
        self._sightings.clear()
        self._seen.clear()

    def take(self) -> Taken:
        """Return everything since the last call: net changes, operations for the journal, new sightings."""
        changes: list[Change] = []
        for place, cache in self.caches.items():
            stored, removed = cache.net()
            cleared = place.rank in self._cleared
            if stored or removed or cleared:
                # One clear empties all places of the rank, so it stands in the first of them only.
                self._cleared.discard(place.rank)
                changes.append(Change(place, stored, removed, cleared))
        ops, self._ops = self._ops, []
        sightings, self._sightings = self._sightings, []
        return Taken(changes, ops, sightings)

    def redo(self, op: Op) -> None:
        """Carry out an operation of the journal. Nothing of it is reported as a change."""
        if op.kind == "clear":
            for place in [place for place in self.caches if place.rank == op.rank]:
                self.caches[place] = Cache(block_size=self.caches[place].block_size)
            return
        cache = self._cache(Place(op.rank, op.group, op.medium), op.block_size)
        hashes = unpack_keys(op.hashes)
        if op.kind == "add":
            cache.add(hashes, unpack_keys(op.keys), shareable=op.shareable)
        elif op.kind == "aside":
            cache.put_aside(hashes)
        elif op.kind == "drop":
            cache.drop(hashes)
        else:
            raise ValueError(f"unknown ledger operation {op.kind!r}")
        cache.stored, cache.removed = array("Q"), array("Q")

    def dump(self) -> list[Op]:
        """Return the operations that rebuild the present state from nothing."""
        ops: list[Op] = []
        for place, cache in self.caches.items():
            size = cache.block_size
            if cache.owners:
                for shareable in (False, True):
                    some = {n: key for n, key in cache.blocks.items() if (key in cache.owners) is shareable}
                    ops.append(Op("add", *place, pack_keys(some), pack_keys(some.values()), size, shareable))
            else:
                ops.append(Op("add", *place, pack_keys(cache.blocks), pack_keys(cache.blocks.values()), size))
            # Further copies need no key: the hashes are known by then.
            more = [(n, copies - 1) for n, copies in cache.copies.items()] + list(cache.aside.items())
            while more:
                ops.append(Op("aside", *place, pack_keys(n for n, _ in more), b"", size))
                more = [(n, left - 1) for n, left in more if left > 1]
        return ops

    def _store(self, rank: int, event: Stored) -> None:
        place = Place(rank, event.group, event.medium)
        cache = self._cache(place, event.block_size)
        parent: Key | None
        if cache.block_size != event.block_size:
            # An entry for part of a block, or a group that changed its size: such keys would mean something else.
            parent, reason = None, "block_size"
        elif event.parent is None:
            parent, reason = self._seed(event.lora, event.salt), ""
        else:
            parent, reason = cache.blocks.get(event.parent), "unknown_parent"
            if parent is None:
                parent = self._parent_elsewhere(rank, event.block_size, event.parent)
        if parent is None:
            self.counts[reason] += len(event.hashes)
            cache.put_aside(event.hashes)
            self._ops.append(Op("aside", *place, pack_keys(event.hashes), b"", cache.block_size))
            return
        keys = chain(event.ids, event.block_size, len(event.hashes), event.extras, parent)
        shareable = event.lora is not None
        conflicts = cache.add(event.hashes, keys, shareable=shareable)
        if conflicts:
            self.counts["hash_conflict"] += conflicts
        self.counts["stored"] += len(keys)
        self._ops.append(Op("add", *place, pack_keys(event.hashes), pack_keys(keys), cache.block_size, shareable))
        if event.spans:
            self._sight(rank, event, keys, parent)

    def _remove(self, rank: int, event: Removed) -> None:
        place = Place(rank, event.group, event.medium)
        cache = self._cache(place, 0)
        unknown = cache.drop(event.hashes)
        self.counts["removed"] += len(event.hashes) - unknown
        if unknown:
            self.counts["unknown_removed"] += unknown
        self._ops.append(Op("drop", *place, pack_keys(event.hashes)))

    def _parent_elsewhere(self, rank: int, block_size: int, parent: int) -> Key | None:
        """Look in the rank's other groups and media: a block's key depends on neither, and one may hold the parent."""
        for place, cache in self.caches.items():
            if place.rank == rank and cache.block_size == block_size and parent in cache.blocks:
                return cache.blocks[parent]
        return None

    def _cache(self, place: Place, block_size: int) -> Cache:
        cache = self.caches.get(place)
        if cache is None:
            cache = self.caches[place] = Cache()
        if not cache.block_size:
            cache.block_size = block_size
        return cache

    def _seed(self, lora: str | None, salt: str | None) -> Key:
        seed = self._seeds.get((lora, salt))
        if seed is None:
            if len(self._seeds) >= MAX_SEEN:
                self._seeds.clear()
            seed = self._seeds[lora, salt] = self._seed_of(lora, salt)
        return seed

    def _sight(self, rank: int, event: Stored, keys: "array[int]", parent: Key) -> None:
        fresh = [span for span in event.spans if span[2] >= 0 and span[1] not in self._seen]
        if not fresh:
            return
        size, ids = event.block_size, event.ids
        starts = sorted({number * size + start for number, _, start in event.spans})
        for number, identity, start in fresh:
            if identity in self._seen:
                continue  # twice in one event
            if len(self._seen) >= MAX_SEEN:
                del self._seen[next(iter(self._seen))]
            begin = number * size + start
            limit = next((s for s in starts if s > begin), len(ids))
            end = next((n for n in range(begin, limit) if ids[n] != ids[begin]), limit)
            before = keys[number - 1] if number else (None if event.parent is None else parent)
            sighting = self._seen[identity] = Sighting(rank, event.group, before, start, end - begin, identity)
            self._sightings.append(sighting)


def _reason(event: Ignored) -> str:
    return f"ignored_{event.reason}"
