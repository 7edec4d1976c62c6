"""What one engine holds: engine hash -> (block key, copies), per rank, group and medium. Pure; no I/O.

Engines store one hash once per physical copy and remove it as often, so copies are counted. The ledger turns batches of
engine events into net changes of block keys, and into the operations that a journal needs to rebuild it. A block whose
key cannot be known (its parent is not known, its size is not the group's) is put aside and counted under its reason: it
is never published, but its copies are counted, so that they are right once its key is learned.

Where a group with full attention is present, that group decides what a hit is (``mmrouter_lib.feed.deciding``), and
nothing
is recomputed for the others. Where a sliding window decides, :mod:`mmrouter_sidecar.blocks.sliding_windows` finds
the blocks of events
that name only some.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from mmrouter_lib.block_keys import Key, chain, pack_keys, unpack_keys
from mmrouter_lib.engines.base.events import Batch, Cleared, Ignored, Ragged, Removed, Stored
from mmrouter_lib.feed import CacheGroup, ImageObservation, deciding
from mmrouter_sidecar.blocks.block_table import Cache
from mmrouter_sidecar.blocks.image_observations import Sightings
from mmrouter_sidecar.blocks.sliding_windows import Windows

MAX_SEEDS = 65_536


class Place(NamedTuple):
    """Where blocks are: one data parallel rank, cache group and medium."""

    rank: int
    group: int
    medium: str


class Op(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step that changed the ledger; replaying all of them rebuilds it. Hashes and keys are packed 8-byte numbers.

    ``add``: one copy of each hash, with its key. ``aside``: one copy of each, without a key. ``drop``: one copy of each
    less. ``clear``: the whole rank. ``resize``: the blocks of a place are of another size, what it held is aside.
    ``group``: what is known of a cache group. ``known``: keys and digests of blocks of a window group, held or not.
    """

    kind: str
    rank: int
    group: int = 0
    medium: str = ""
    hashes: bytes = b""
    keys: bytes = b""
    block_size: int = 0
    shareable: bool = False
    spec: str = ""  # the group's kind
    window: int = 0  # tokens
    digests: bytes = b""


class Adding(NamedTuple):
    """Blocks that were added to one place one event after the other: one operation, and not one per event."""

    place: Place
    block_size: int
    shareable: bool
    hashes: "array[int]"
    keys: "array[int]"


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
    sightings: list[ImageObservation]


class Ledger:
    """All places of one engine. ``counts`` counts, by reason, what was not indexed as it came."""

    def __init__(self, seed_of: Callable[[str | None, str | None], Key]) -> None:
        """``seed_of(lora, salt)`` returns the seed of a chain (``mmrouter_lib.block_keys.namespace_seed``)."""
        self.caches: dict[Place, Cache] = {}
        self.counts: Counter[str] = Counter()
        self.sightings = Sightings()
        self.windows = Windows()
        self._groups: dict[int, CacheGroup] = {}
        self._ordered: tuple[CacheGroup, ...] = ()
        self._decides = deciding(())
        self._apart: set[int] = set()  # groups of which nothing is indexed
        self._seed_of = seed_of
        self._seeds: dict[tuple[str | None, str | None], Key] = {}
        self._cleared: set[int] = set()
        self._ops: list[Op] = []
        self._adding: Adding | None = None  # what comes after the operations

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
        """Tokens per block of the group that decides, 0 until the engine stored something."""
        group = self._decides.group
        return next((cache.block_size for place, cache in self.caches.items() if place.group == group), 0)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Indexed cache groups in ascending order, as the engine's events name them."""
        return self._ordered

    @property
    def dirty(self) -> bool:
        """Whether :meth:`take` would return anything."""
        return bool(self._ops or self._adding or self.sightings.fresh or self._cleared)

    def apply(self, batch: Batch, rank: int) -> None:
        """Apply one batch of the engine rank whose stream it came from, in order."""
        if batch.rank != rank:
            self.counts["rank_mismatch"] += 1
        for event in batch.events:
            if isinstance(event, Stored):
                self._store(rank, event)
            elif isinstance(event, Removed):
                self._remove(rank, event)
            elif isinstance(event, Ragged):
                self._store_ragged(rank, event)
            elif isinstance(event, Cleared):
                self.counts["cleared"] += 1
                self._empty(rank)
            else:
                self.counts[_reason(event)] += 1
                if event.group is not None:
                    self._apart.add(event.group)

    def clear(self, rank: int) -> None:
        """Empty one rank: what we know of it is not proved any more."""
        self.sightings.doubt()
        self._empty(rank)

    def _empty(self, rank: int) -> None:
        mine = [place for place in self.caches if place.rank == rank]
        if any(self.caches[place].blocks or self.caches[place].removed for place in mine):
            self._cleared.add(rank)
        if mine:
            self._note(Op("clear", rank))
        for place in mine:
            self.caches[place] = Cache(block_size=self.caches[place].block_size)

    def reset(self) -> None:
        """Forget everything, with what was not taken yet: a new epoch begins empty."""
        self.caches.clear()
        self._cleared.clear()
        self._ops.clear()
        self._adding = None
        self.sightings = Sightings()
        self.windows.clear()
        self._groups.clear()
        self._regroup()
        self._apart.clear()

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
        self._added()
        ops, self._ops = self._ops, []
        keys, digests = self.windows.take()
        if keys:
            ops.append(Op("known", 0, keys=pack_keys(keys), digests=digests))
        return Taken(changes, ops, self.sightings.take())

    def redo(self, op: Op) -> None:
        """Carry out an operation of the journal. Nothing of it is reported as a change."""
        if op.kind == "clear":
            for place in [place for place in self.caches if place.rank == op.rank]:
                self.caches[place] = Cache(block_size=self.caches[place].block_size)
            return
        if op.kind == "group":
            self._groups[op.group] = CacheGroup(op.group, op.spec, op.window)
            self._regroup()
            return
        if op.kind == "known":
            self.windows.recall(unpack_keys(op.keys), op.digests)
            return
        self.sightings.doubt()  # runs that began before are not known
        cache = self._cache(Place(op.rank, op.group, op.medium), op.block_size)
        hashes = unpack_keys(op.hashes)
        if op.kind == "add":
            cache.add(hashes, unpack_keys(op.keys), shareable=op.shareable)
        elif op.kind == "aside":
            cache.put_aside(hashes)
        elif op.kind == "drop":
            cache.drop(hashes)
        elif op.kind == "resize":
            cache.resize(op.block_size)
        else:
            raise ValueError(f"unknown ledger operation {op.kind!r}")
        cache.stored, cache.removed = array("Q"), array("Q")

    def dump(self) -> list[Op]:
        """Return the operations that rebuild the present state from nothing."""
        ops = [Op("group", 0, g.group, spec=g.kind, window=g.window) for g in self._ordered]
        if len(self.windows):
            known, digests = self.windows.dump()
            ops.append(Op("known", 0, keys=pack_keys(known), digests=digests))
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
        group = self._groups.get(event.group)
        if group is None or group.kind != event.kind:
            self._meet(event)
        place = Place(rank, event.group, event.medium)
        cache = self._cache(place, event.block_size)
        if cache.block_size != event.block_size and not self._resized(place, cache, event):
            # An entry for part of a block, or a group that changed its size: such keys would mean something else.
            self._put_aside(place, cache, event.hashes, "block_size")
            return
        parent = self._parent(rank, cache, event)
        if parent is None:
            self._put_aside(place, cache, event.hashes, "unknown_parent")
            return
        hashes, ids = event.hashes, event.ids
        blocks = len(hashes)
        if len(ids) < blocks * event.block_size:
            blocks = len(ids) // event.block_size
            self._put_aside(place, cache, hashes[blocks:], "short_store")
            hashes = hashes[:blocks]
        if blocks > 1:
            cache.partial = False
        keys = chain(ids, event.block_size, blocks, event.extras, parent)
        self._add(place, cache, hashes, keys, shareable=event.lora is not None)
        if event.window and self._decides.window:
            self.windows.follow(event, keys)
        if event.spans or ids.typecode == "Q":
            self.sightings.look(rank, event, keys, parent)

    def _store_ragged(self, rank: int, event: Ragged) -> None:
        if event.group not in self._groups or self._groups[event.group].kind != event.kind:
            self._meet(event)
        place = Place(rank, event.group, event.medium)
        cache = self._cache(place, event.block_size)
        if self._decides.group != event.group:
            self._put_aside(place, cache, event.hashes, "ragged_beside")
        elif cache.block_size != event.block_size:
            self._put_aside(place, cache, event.hashes, "block_size")
        else:
            placed = self.windows.place(event, self._seed)
            if placed.hashes:
                cache.partial = False
                self._add(place, cache, placed.hashes, placed.keys, shareable=False)
            self._put_aside(place, cache, placed.rest, "ragged_store")

    def _add(self, place: Place, cache: Cache, hashes: Sequence[int], keys: "array[int]", *, shareable: bool) -> None:
        conflicts = cache.add(hashes, keys, shareable=shareable)
        if conflicts:
            self.counts["hash_conflict"] += conflicts
        self.counts["stored"] += len(keys)
        adding = self._adding
        if (
            adding is None
            or adding.place != place
            or adding.block_size != cache.block_size
            or adding.shareable is not shareable
        ):
            self._added()
            adding = self._adding = Adding(place, cache.block_size, shareable, array("Q"), array("Q"))
        adding.hashes.extend(hashes)
        adding.keys.extend(keys)

    def _added(self) -> None:
        """Turn what was added into an operation."""
        if self._adding is not None:
            place, size, shareable, hashes, keys = self._adding
            self._adding = None
            self._ops.append(Op("add", *place, pack_keys(hashes), pack_keys(keys), size, shareable))

    def _note(self, op: Op) -> None:
        """Keep an operation, after everything that came before it."""
        self._added()
        self._ops.append(op)

    def _put_aside(self, place: Place, cache: Cache, hashes: Sequence[int], reason: str) -> None:
        if hashes:
            self.counts[reason] += len(hashes)
            cache.put_aside(hashes)
            self._note(Op("aside", *place, pack_keys(hashes), b"", cache.block_size))

    def _meet(self, event: Stored | Ragged) -> None:
        """Note a group, or that it is another one than it was."""
        self._groups[event.group] = CacheGroup(event.group, event.kind, event.window or 0)
        self._regroup()
        self._note(Op("group", 0, event.group, spec=event.kind, window=event.window or 0))

    def _regroup(self) -> None:
        self._ordered = tuple(self._groups[number] for number in sorted(self._groups))
        self._decides = deciding(self._ordered)

    def _resized(self, place: Place, cache: Cache, event: Stored) -> bool:
        """Whether all that was known of a place were entries for parts of blocks; they are put aside then.

        A prompt shorter than a block leaves such an entry, always alone in its event
        (docs/engine-facts/vllm.md#event-fields).
        """
        if not cache.partial or event.block_size % cache.block_size:
            return False
        self.counts["block_size"] += len(cache.blocks)
        cache.resize(event.block_size)
        self._note(Op("resize", *place, block_size=event.block_size))
        return True

    def _remove(self, rank: int, event: Removed) -> None:
        if event.group in self._apart and event.group not in self._groups:
            self.counts["removed_apart"] += len(event.hashes)
            return
        place = Place(rank, event.group, event.medium)
        cache = self._cache(place, 0)
        unknown = cache.drop(event.hashes)
        self.counts["removed"] += len(event.hashes) - unknown
        if unknown:
            self.counts["unknown_removed"] += unknown
        self._note(Op("drop", *place, pack_keys(event.hashes)))

    def _parent(self, rank: int, cache: Cache, event: Stored) -> Key | None:
        if event.parent is None:
            return self._seed(event.lora, event.salt)
        parent = cache.blocks.get(event.parent)
        return self._parent_elsewhere(rank, event.block_size, event.parent) if parent is None else parent

    def _parent_elsewhere(self, rank: int, block_size: int, parent: int) -> Key | None:
        """Look in the rank's other groups and media: a block's key depends on neither, and one may hold the parent.

        Where a window decides, the parent may have been dropped long ago, or never stored.
        """
        for place, cache in self.caches.items():
            if place.rank == rank and cache.block_size == block_size and parent in cache.blocks:
                return cache.blocks[parent]
        return self.windows.key(parent)

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
            if len(self._seeds) >= MAX_SEEDS:
                self._seeds.clear()
            seed = self._seeds[lora, salt] = self._seed_of(lora, salt)
        return seed


def _reason(event: Ignored) -> str:
    return f"ignored_{event.reason}"
