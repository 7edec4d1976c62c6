"""Observe images in engine events: the position and length of each run of placeholder tokens, and its identity.

vLLM names images beside the token ids, so each identity is observed once. SGLang writes *sentinels* into the ids, a
cycle of up to four values that restarts with every run (docs/engine-facts/sglang.md#sentinels). Such a run is observed
once per place, because only a router that knows the request at a place can identify the image, and it may have missed
the first one. A run may continue in a later event; its start is then known only if the block before was seen.

Pure; no I/O.
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
CHUNK = 16  # number of cycles that are compared at once


class _Run(NamedTuple):
    """A run of sentinels up to some token: its place, its distinct values in order, and its length so far."""

    parent: Key | None
    offset: int
    values: tuple[int, ...]
    length: int

    @property
    def whole(self) -> bool:
        return len(self.values) == WIDE_SENTINELS or self.length > len(self.values)


class ImageObservations:
    """Observed images, bounded: the oldest are forgotten."""

    def __init__(self) -> None:
        self._seen: dict[object, ImageObservation] = {}
        self._new: list[ImageObservation] = []
        self._open: dict[int, _Run] = {}
        self._complete = True  # whether every block that ends within a run is in _open

    @property
    def remembered(self) -> tuple[ImageObservation, ...]:
        """All remembered observations, oldest first."""
        return tuple(self._seen.values())

    @property
    def fresh(self) -> bool:
        return bool(self._new)

    def take(self) -> list[ImageObservation]:
        new, self._new = self._new, []
        return new

    def doubt(self) -> None:
        """Note that events were missed, so a run may continue one that is unknown."""
        self._complete = False

    def recall(self, sightings: Iterable[ImageObservation]) -> None:
        for sighting in sightings:
            self._remember(_name(sighting), sighting)

    def observe(self, rank: int, event: Stored, keys: Sequence[Key], parent: Key) -> None:
        """Observe the images of an event; ``keys``: of its blocks; ``parent``: key of the block before, or the seed."""
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
                continue  # twice in this event
            limit = next((s for s in starts if s > begin), len(ids))
            end = next((n for n in range(begin, limit) if ids[n] != ids[begin]), limit)
            before = keys[number - 1] if number else (None if event.parent is None else parent)
            self._add(identity, ImageObservation(rank, event.group, before, start, end - begin, identity))

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
            if at == start:  # it does not continue the block before
                before = keys[number - 1] if number else (None if event.parent is None else parent)
                run, at = _follow(ids, at, _Run(before, at % size, (), 0))
                if start == 0 and event.parent is not None and open_run is None and not self._complete:
                    continue  # it may have begun in a block that was not seen
            assert run is not None
            self._keep_open(event, run, start, at)
            if run.whole or at < len(ids):
                sighting = ImageObservation(rank, event.group, run.parent, run.offset, run.length, b"", run.values)
                if _name(sighting) not in self._seen:
                    self._add(_name(sighting), sighting)

    def _keep_open(self, event: Stored, run: _Run, start: int, end: int) -> None:
        size = event.block_size
        for number in range(start // size, end // size):
            length = run.length - (end - (number + 1) * size)
            part = run._replace(values=run.values[:length], length=length)
            self._open[event.hashes[number]] = part
            if len(self._open) > MAX_OPEN:
                del self._open[next(iter(self._open))]
                self._complete = False

    def _add(self, name: object, sighting: ImageObservation) -> None:
        self._remember(name, sighting)
        self._new.append(sighting)

    def _remember(self, name: object, sighting: ImageObservation) -> None:
        self._seen[name] = sighting
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]


def _name(sighting: ImageObservation) -> object:
    return sighting.identity or (sighting.rank, sighting.parent, sighting.offset, sighting.sentinels)


def _follow(ids: "array[int]", at: int, run: _Run) -> tuple[_Run, int]:
    """Extend a run by its tokens from ``at`` on; return it and its end."""
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
