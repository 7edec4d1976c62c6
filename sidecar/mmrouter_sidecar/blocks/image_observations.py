"""Images seen in an engine's events: where each one's run of placeholder tokens starts and who it is. Pure; no I/O.

vLLM names images beside the token ids, so each identity is sighted once. SGLang writes *sentinels* into the ids, a
cycle of up to four values that starts anew with every run (docs/engine-facts/sglang.md#sentinels). Such a run is
sighted once per
place, because only a router that knows what was asked for at a place can tell whose it is, and it may have missed the
first one. A run may go on in a later event; where it started is then known only if this process saw the block before.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mmrouter_lib.block_keys import Key
from mmrouter_lib.engines.base.events import Stored
from mmrouter_lib.engines.sglang.identity import SENTINEL_BASE, WIDE_SENTINELS
from mmrouter_lib.feed import ImageObservation

MAX_SEEN = 16_384
MAX_OPEN = 32_768
CHUNK = 16
"""Cycles compared at a time."""


class _Run(NamedTuple):
    """A run of sentinels up to some token: its place, its values in their order from the start, its tokens so far."""

    parent: Key | None
    offset: int
    values: tuple[int, ...]
    length: int

    @property
    def whole(self) -> bool:
        """Whether the values are all that cycle, however the run goes on."""
        return len(self.values) == WIDE_SENTINELS or self.length > len(self.values)


class Sightings:
    """What was seen. ``remembered`` is bounded; the oldest are forgotten."""

    def __init__(self) -> None:
        self._seen: dict[object, ImageObservation] = {}
        self._new: list[ImageObservation] = []
        self._open: dict[int, _Run] = {}
        self._complete = True  # every block that ends within a run is in _open

    @property
    def remembered(self) -> tuple[ImageObservation, ...]:
        """Oldest first."""
        return tuple(self._seen.values())

    @property
    def fresh(self) -> bool:
        """Whether :meth:`take` would return anything."""
        return bool(self._new)

    def take(self) -> list[ImageObservation]:
        """Return the new ones since the last call."""
        new, self._new = self._new, []
        return new

    def doubt(self) -> None:
        """Events were missed."""
        self._complete = False

    def recall(self, sightings: Iterable[ImageObservation]) -> None:
        """Remember what another process saw."""
        for sighting in sightings:
            self._remember(_name(sighting), sighting)

    def look(self, rank: int, event: Stored, keys: Sequence[Key], parent: Key) -> None:
        """Look for images in an event; ``keys`` are those of its blocks, ``parent`` the one before (or the seed)."""
        if event.spans:
            self._spans(rank, event, keys, parent)
        elif event.ids.typecode == "Q" and max(event.ids, default=0) >= SENTINEL_BASE:
            self._sentinels(rank, event, keys, parent)

    def _spans(self, rank: int, event: Stored, keys: Sequence[Key], parent: Key) -> None:
        fresh = [span for span in event.spans if span[2] >= 0 and span[1] not in self._seen]
        if not fresh:
            return
        size, ids = event.block_size, event.ids
        starts = sorted({number * size + start for number, _, start in event.spans})
        for number, identity, start in fresh:
            begin = number * size + start
            if identity in self._seen or begin >= len(ids):
                continue  # twice in one event
            limit = next((s for s in starts if s > begin), len(ids))
            end = next((n for n in range(begin, limit) if ids[n] != ids[begin]), limit)
            before = keys[number - 1] if number else (None if event.parent is None else parent)
            self._sight(identity, ImageObservation(rank, event.group, before, start, end - begin, identity))

    def _sentinels(self, rank: int, event: Stored, keys: Sequence[Key], parent: Key) -> None:
        ids, size = event.ids, event.block_size
        at = 0
        open_run = self._open.get(event.parent) if event.parent is not None else None
        while at < len(ids):
            if ids[at] < SENTINEL_BASE:
                at += 1
                continue
            start, number = at, at // size
            run = None
            if not at and open_run is not None:
                run, at = _follow(ids, at, open_run)
            if at == start:  # it does not go on from the block before
                before = keys[number - 1] if number else (None if event.parent is None else parent)
                run, at = _follow(ids, at, _Run(before, at % size, (), 0))
                if start == 0 and event.parent is not None and open_run is None and not self._complete:
                    continue  # perhaps it began in a block that we never saw
            assert run is not None
            self._keep_open(event, run, start, at)
            if run.whole or at < len(ids):
                sighting = ImageObservation(rank, event.group, run.parent, run.offset, run.length, b"", run.values)
                if _name(sighting) not in self._seen:
                    self._sight(_name(sighting), sighting)

    def _keep_open(self, event: Stored, run: _Run, start: int, end: int) -> None:
        """Note the blocks that end within a run."""
        size = event.block_size
        for number in range(start // size, end // size):
            length = run.length - (end - (number + 1) * size)
            part = run._replace(values=run.values[:length], length=length)
            self._open[event.hashes[number]] = part
            if len(self._open) > MAX_OPEN:
                del self._open[next(iter(self._open))]
                self._complete = False

    def _sight(self, name: object, sighting: ImageObservation) -> None:
        self._remember(name, sighting)
        self._new.append(sighting)

    def _remember(self, name: object, sighting: ImageObservation) -> None:
        self._seen[name] = sighting
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]


def _name(sighting: ImageObservation) -> object:
    return sighting.identity or (sighting.rank, sighting.parent, sighting.offset, sighting.sentinels)


def _follow(ids: "array[int]", at: int, run: _Run) -> tuple[_Run, int]:
    """Return a run with the tokens from ``at`` on that belong to it, and where it ends."""
    values, length = run.values, run.length
    while at < len(ids) and ids[at] >= SENTINEL_BASE:
        if length == len(values) < WIDE_SENTINELS and (not values or ids[at] != values[0]):
            values += (ids[at],)
        elif ids[at] != values[length % len(values)]:
            break
        elif length % len(values) == 0:  # the cycle is known
            cycles = array("Q", values) * CHUNK
            while ids[at : at + len(cycles)] == cycles:
                at, length = at + len(cycles), length + len(cycles)
            if at == len(ids) or ids[at] != values[0]:
                break
        at, length = at + 1, length + 1
    return run._replace(values=values, length=length), at
