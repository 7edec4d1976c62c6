"""Ledger of the blocks that one engine holds: engine hash -> (block key, copies), per rank, group and medium.

Engines store one hash once per physical copy and remove it as often, so copies are counted. The ledger turns batches of
engine events into net changes of block keys, and into the operations from which the journal can rebuild it. A block
without a known key (unknown parent, or another size than the group's) is put aside and counted by reason: it is not
published, but its copies are counted, so that they are right once its key is known. A block that an event of a lower
tier names by hash alone has the key of that hash elsewhere on its rank.

Cache groups share one chain of hashes, and events of groups other than full attention name only some of the blocks that
their tokens fill. Beside full attention, which names all, the same hash has the same key, and blocks that are parts of
its blocks have the key of the whole. Without it,
:mod:`mmrouter_sidecar.blocks.window_block_keys` locates the blocks. Pure; no I/O.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmrouter_lib.block_keys import Key, chain, pack_keys, unpack_keys
from mmrouter_lib.cache_layout import DEVICE, FULL_KINDS, CacheGroup
from mmrouter_lib.engines.base.events import Batch, Cleared, Offloaded, Ragged, Removed, Stored
from mmrouter_lib.feed import ImageObservation
from mmrouter_sidecar.blocks.block_table import BlockTable, whole_blocks
from mmrouter_sidecar.blocks.image_observations import ImageObservations
from mmrouter_sidecar.blocks.known_groups import KnownGroups
from mmrouter_sidecar.blocks.ledger_ops import LedgerOp, Place, group_op
from mmrouter_sidecar.blocks.removed_keys import RemovedKeys
from mmrouter_sidecar.blocks.window_block_keys import WindowBlocks

MAX_SEEDS = 65_536


class PendingAdd(NamedTuple):
    """Blocks added to one place by successive events, collected for one operation."""

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


class LedgerChanges(NamedTuple):
    """Everything since the last :meth:`Ledger.take`: net changes, operations, new image observations."""

    changes: list[Change]
    ops: list[LedgerOp]
    sightings: list[ImageObservation]


class Ledger:
    """All places of one engine. ``counts``: blocks and events by outcome."""

    def __init__(self, seed_of: Callable[[str | None, str | None], Key]) -> None:
        """``seed_of(lora, salt)`` returns the seed of a chain (``mmrouter_lib.block_keys.namespace_seed``)."""
        self.tables: dict[Place, BlockTable] = {}
        self.counts: Counter[str] = Counter()
        self.observations = ImageObservations()
        self.windows = WindowBlocks()
        self.lower_media: tuple[str, ...] = ()  # media other than device memory that events have named
        self._removed = RemovedKeys()  # while there are lower media
        self._groups = KnownGroups()
        self._seed_of = seed_of
        self._seeds: dict[tuple[str | None, str | None], Key] = {}
        self._cleared: set[int] = set()
        self._ops: list[LedgerOp] = []
        self._adding: PendingAdd | None = None  # follows the operations in _ops

    @property
    def held(self) -> int:
        return sum(table.held for table in self.tables.values())

    @property
    def has_aside(self) -> bool:
        """Whether the engine holds blocks without a known key, on its device or below."""
        return any(table.aside for table in self.tables.values())

    @property
    def aside(self) -> int:
        """Number of hashes held without a key, beside those of parts of blocks."""
        return sum(len(table.aside.keys() - table.wholes_of.keys()) for table in self.tables.values())

    @property
    def block_size(self) -> int:
        """Tokens per block of the primary group, 0 until the engine stored a block."""
        return next(
            (t.block_size for place, t in self.tables.items() if place[1:] == (self._groups.primary, DEVICE)), 0
        )

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups that events have named: those with full attention, then the others, in ascending order."""
        return self._groups.ordered

    @property
    def dirty(self) -> bool:
        return bool(self._ops or self._adding or self.observations.fresh or self._cleared)

    def apply(self, batch: Batch, rank: int) -> None:
        if batch.rank != rank:
            self.counts["rank_mismatch"] += 1
        for event in batch.events:  # full attention first, from which others get their keys, may be the last one
            if isinstance(event, Stored | Ragged) and event.group not in self._groups.named:
                self._name(event)
        for event in self._groups.in_order(batch.events) if self._groups.beside else batch.events:
            if isinstance(event, Stored):
                self._store(rank, event)
            elif isinstance(event, Removed):
                self._remove(rank, event)
            elif isinstance(event, Ragged):
                self._store_ragged(rank, event)
            elif isinstance(event, Offloaded):
                self._store_below(rank, event)
            elif isinstance(event, Cleared):
                self.counts["cleared"] += 1
                self._empty(rank)
            else:
                self.counts[f"ignored_{event.reason}"] += 1

    def clear(self, rank: int) -> None:
        """Clear one rank, whose state is no longer proved."""
        self.observations.doubt()
        self._empty(rank)

    def _empty(self, rank: int) -> None:
        mine = [place for place in self.tables if place.rank == rank]
        if any(self.tables[place].blocks or self.tables[place].removed for place in mine):
            self._cleared.add(rank)
        if mine:
            self._append_op(LedgerOp("clear", rank))
        self._removed.clear()  # a tier's event may be older than the clear
        self._renew(rank)

    def _renew(self, rank: int) -> None:
        for place in [place for place in self.tables if place.rank == rank]:
            self.tables[place] = BlockTable(block_size=self.tables[place].block_size)

    def reset(self) -> None:
        """Drop everything, including changes that were not taken."""
        self.tables.clear()
        self.lower_media = ()
        self._removed.clear()
        self._cleared.clear()
        self._ops.clear()
        self._adding = None
        self.observations = ImageObservations()
        self.windows.clear()
        self._groups.clear()

    def take(self) -> LedgerChanges:
        changes: list[Change] = []
        for place, table in self.tables.items():
            stored, removed = table.net()
            cleared = place.rank in self._cleared
            if stored or removed or cleared:
                # One clear covers all places of the rank, so only the first change has it.
                self._cleared.discard(place.rank)
                changes.append(Change(place, stored, removed, cleared))
        self._flush_adding()
        ops, self._ops = self._ops, []
        keys, digests = self.windows.take()
        if keys:
            ops.append(LedgerOp("known", 0, keys=pack_keys(keys), digests=digests))
        return LedgerChanges(changes, ops, self.observations.take())

    def redo(self, op: LedgerOp) -> None:
        """Apply an operation from the journal without reporting it as a change."""
        if op.kind == "clear":
            self._renew(op.rank)
            return
        if op.kind == "group":
            self._groups.put(CacheGroup(op.group, op.spec, op.window, op.block_size, op.parts, op.lookahead))
            return
        if op.kind == "known":
            self.windows.recall(unpack_keys(op.keys), op.digests)
            return
        self.observations.doubt()  # runs that began before are unknown
        table = self._table(Place(op.rank, op.group, op.medium), op.block_size)
        hashes = unpack_keys(op.hashes)
        if op.kind == "add":
            table.add(hashes, unpack_keys(op.keys), shareable=op.shareable)
        elif op.kind == "aside":
            table.put_aside(hashes)
        elif op.kind == "join":
            table.join(hashes[-1], tuple(hashes[:-1]), unpack_keys(op.keys)[0], shareable=op.shareable)
        elif op.kind == "drop":
            table.drop(hashes)
        elif op.kind == "resize":
            table.resize(op.block_size)
        else:
            raise ValueError(f"unknown ledger operation {op.kind!r}")
        table.stored, table.removed = array("Q"), array("Q")

    def dump(self) -> list[LedgerOp]:
        """Return the operations that rebuild the current state."""
        ops = [group_op(group) for group in self._groups]
        if len(self.windows):
            known, digests = self.windows.dump()
            ops.append(LedgerOp("known", 0, keys=pack_keys(known), digests=digests))
        for place, table in self.tables.items():
            size = table.block_size
            if table.owners:
                for shareable in (False, True):
                    some = {n: key for n, key in table.blocks.items() if (key in table.owners) is shareable}
                    ops.append(LedgerOp("add", *place, pack_keys(some), pack_keys(some.values()), size, shareable))
            else:
                ops.append(LedgerOp("add", *place, pack_keys(table.blocks), pack_keys(table.blocks.values()), size))
            # Further copies need no key, because the hashes are known by then.
            more = [(n, copies - 1) for n, copies in table.copies.items()] + list(table.aside.items())
            while more:
                ops.append(LedgerOp("aside", *place, pack_keys(n for n, _ in more), b"", size))
                more = [(n, left - 1) for n, left in more if left > 1]
            ops += [
                LedgerOp("join", *place, pack_keys((*parts, n)), pack_keys((key,)), size, shareable)
                for n, (key, parts, shareable) in table.joined.items()
            ]
        return ops

    def _store(self, rank: int, event: Stored) -> None:
        if self._groups.named.get(event.group) != (event.kind, event.lookahead):
            self._name(event)
        place = Place(rank, event.group, event.medium)
        table = self._table(place, event.block_size)
        if table.block_size != event.block_size and not self._resized(place, table, event):
            # A part of a block, or another block size of the group: its keys would not be comparable.
            self._put_aside(place, table, event.hashes, "block_size")
            return
        shareable = event.lora is not None
        if event.group in self._groups.beside:
            if event.block_size != self.block_size:
                self._store_beside(place, table, event)
                return
            located = self._keys_of_full(rank, event)
            if len(located) == len(event.hashes):
                self._add(place, table, event.hashes, array("Q", located.values()), shareable=shareable)
                return
        parent = self._parent(rank, table, event)
        if parent is None:
            self._put_aside(place, table, event.hashes, "unknown_parent")
            return
        hashes, ids = event.hashes, event.ids
        blocks = len(hashes)
        if len(ids) < blocks * event.block_size:
            blocks = len(ids) // event.block_size
            self._put_aside(place, table, hashes[blocks:], "short_store")
            hashes = hashes[:blocks]
        if blocks > 1:
            table.partial = False
        keys = chain(ids, event.block_size, blocks, event.extras, parent)
        self._add(place, table, hashes, keys, shareable=shareable)
        if event.kind not in FULL_KINDS and self._groups.full is None:
            self.windows.follow(event, keys)
        if (event.spans or ids.typecode == "Q") and event.medium == DEVICE:
            self.observations.observe(rank, event, keys, parent)

    def _store_ragged(self, rank: int, event: Ragged) -> None:
        self._name(event)
        place = Place(rank, event.group, event.medium)
        table = self._table(place, event.block_size)
        if table.block_size != event.block_size:
            self._put_aside(place, table, event.hashes, "block_size")
            return
        if event.group in self._groups.beside:
            self._store_beside(place, table, event)
            return
        hashes, keys, rest = self.windows.place(event, self._seed)
        if hashes:
            table.partial = False
            self._add(place, table, hashes, keys, shareable=event.lora is not None)
        self._put_aside(place, table, rest, "ragged_store")

    def _store_beside(self, place: Place, table: BlockTable, event: Stored | Ragged) -> None:
        """Add the blocks that full attention has a key for, or parts of which make one that it has a key for."""
        located = self._keys_of_full(place.rank, event)
        if (parts := self.block_size // event.block_size) > 1:
            self._join(place, table, event, located, parts)
            return
        if located:
            table.partial = False
            hashes, keys = tuple(located), array("Q", located.values())
            self._add(place, table, hashes, keys, shareable=event.lora is not None)
        self._put_aside(place, table, [number for number in event.hashes if number not in located], "ragged_store")

    def _join(self, place: Place, table: BlockTable, event: Stored | Ragged, ends: dict[int, Key], parts: int) -> None:
        table.put_aside(event.hashes)
        self._append_op(LedgerOp("aside", *place, pack_keys(event.hashes), b"", table.block_size))
        self.counts["stored"] += len(event.hashes)
        shareable = event.lora is not None
        for joined in whole_blocks(event.hashes, ends, parts):
            key = ends[joined[-1]]
            table.join(joined[-1], joined[:-1], key, shareable=shareable)
            self._append_op(LedgerOp("join", *place, pack_keys(joined), pack_keys((key,)), shareable=shareable))

    def _store_below(self, rank: int, event: Offloaded) -> None:
        above = self.tables.get(Place(rank, event.group, DEVICE))
        place = Place(rank, event.group, event.medium)
        table = self._table(place, above.block_size if above is not None else 0)
        held = [known.blocks for other, known in self.tables.items() if other.rank == rank]
        hashes, keys, rest = self._removed.locate(event.hashes, held)
        if hashes:
            self._add(place, table, hashes, keys, shareable=True)  # some may have adapters
        self._put_aside(place, table, rest, "unknown_below")

    def _keys_of_full(self, rank: int, event: Stored | Ragged) -> dict[int, Key]:
        """Return the keys that full attention has for an event's hashes: equal hashes are of equal prompts up to there,
        whatever the size of the blocks that end there.
        """
        full = [
            table.blocks
            for place, table in self.tables.items()
            if place.group == self._groups.full and place.rank == rank
        ]
        return {number: blocks[number] for number in event.hashes for blocks in full if number in blocks}

    def _add(
        self, place: Place, table: BlockTable, hashes: Sequence[int], keys: "array[int]", *, shareable: bool
    ) -> None:
        if conflicts := table.add(hashes, keys, shareable=shareable):
            self.counts["hash_conflict"] += conflicts
        self.counts["stored"] += len(keys)
        adding = self._adding
        if adding is None or adding[:3] != (place, table.block_size, shareable):
            self._flush_adding()
            adding = self._adding = PendingAdd(place, table.block_size, shareable, array("Q"), array("Q"))
        adding.hashes.extend(hashes)
        adding.keys.extend(keys)

    def _flush_adding(self) -> None:
        if self._adding is not None:
            place, size, shareable, hashes, keys = self._adding
            self._adding = None
            self._ops.append(LedgerOp("add", *place, pack_keys(hashes), pack_keys(keys), size, shareable))

    def _append_op(self, op: LedgerOp) -> None:
        self._flush_adding()
        self._ops.append(op)

    def _put_aside(self, place: Place, table: BlockTable, hashes: Sequence[int], reason: str) -> None:
        if hashes:
            self.counts[reason] += len(hashes)
            table.put_aside(hashes)
            self._append_op(LedgerOp("aside", *place, pack_keys(hashes), b"", table.block_size))

    def _name(self, event: Stored | Ragged) -> None:
        if (group := self._groups.unnamed(event)) is not None:
            self._set_group(group)

    def _set_group(self, group: CacheGroup) -> None:
        alone = self._groups.full is None
        self._groups.put(group)
        self._append_op(group_op(group))
        if alone and self._groups.full is not None:
            self._realign(group.block_size)

    def _realign(self, block_size: int) -> None:
        """Put blocks beside full attention aside that got their keys before its blocks had this size."""
        for place, table in self.tables.items():
            if place.group in self._groups.beside and table.block_size != block_size and table.blocks:
                table.resize(table.block_size)
                self._append_op(LedgerOp("resize", *place, block_size=table.block_size))

    def _resized(self, place: Place, table: BlockTable, event: Stored) -> bool:
        """Put a place's blocks aside if all were parts of blocks; return whether it was so.

        Such an entry stands alone in its event (docs/engine-facts/vllm.md#event-fields).
        """
        grows = table.partial and event.block_size > table.block_size
        if grows:
            self.counts["block_size"] += len(table.blocks)
            table.resize(event.block_size)
            self._append_op(LedgerOp("resize", *place, block_size=event.block_size))
            if event.group == self._groups.full:
                self._realign(event.block_size)
        if (changed := self._groups.with_parts(event, table.block_size)) is not None:
            self._set_group(changed)
        return grows

    def _remove(self, rank: int, event: Removed) -> None:
        place = Place(rank, event.group, event.medium)
        table = self._table(place, 0)
        if self.lower_media:
            self._removed.remember(event.hashes, table.blocks)
        if unknown := table.drop(event.hashes):
            self.counts["unknown_removed"] += unknown
        self.counts["removed"] += len(event.hashes) - unknown
        self._append_op(LedgerOp("drop", *place, pack_keys(event.hashes)))

    def _parent(self, rank: int, table: BlockTable, event: Stored) -> Key | None:
        if event.parent is None:
            return self._seed(event.lora, event.salt)
        parent = table.blocks.get(event.parent)
        return self._parent_elsewhere(rank, event.block_size, event.parent) if parent is None else parent

    def _parent_elsewhere(self, rank: int, block_size: int, parent: int) -> Key | None:
        """Find a parent elsewhere on the rank; without full attention it may have been dropped, or never stored."""
        for place, table in self.tables.items():
            if place.rank == rank and table.block_size == block_size and parent in table.blocks:
                return table.blocks[parent]
        return self.windows.key(parent)

    def _table(self, place: Place, block_size: int) -> BlockTable:
        table = self.tables.get(place)
        if table is None:
            table = self.tables[place] = BlockTable()
            if place.medium != DEVICE and place.medium not in self.lower_media:
                self.lower_media += (place.medium,)
        if not table.block_size:
            table.block_size = block_size
        return table

    def _seed(self, lora: str | None, salt: str | None) -> Key:
        seed = self._seeds.get((lora, salt))
        if seed is None:
            if len(self._seeds) >= MAX_SEEDS:
                self._seeds.clear()
            seed = self._seeds[lora, salt] = self._seed_of(lora, salt)
        return seed
