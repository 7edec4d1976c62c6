"""Align sightings of an engine's stored images with the requests that were sent to it. Pure.

A *place* is where an image's first run starts: the key of the block before, and the offset in its own block. The places
of a request's images are known before the engine answers, up to the first block that holds an unknown image; once that
one is learned, the next ones follow. A sighting names a place and the sentinels there. An image is learned only where
it is the only candidate for a place. This requires that the router sent every request with images that the engine got;
the caller says when that does not hold (``trusted``).
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mmrouter_lib.block_keys import Key, Span, block_keys
from mmrouter_router.sentinels.table import SentinelTable, Values, fill_sentinels

MAX_PLACES = 8_192
MAX_OPEN = 256  # requests kept because one of their images has no place yet
ENOUGH = 4  # tokens of a run that show its whole cycle

Place = tuple[Key | None, int]
"""Where a run starts: key of the block before its own (``None``: its own is the first), and the offset in its own."""


class SentRequest(NamedTuple):
    """A request as it was sent: its prompt with plain placeholders, and the spans of its images."""

    ids: "array[int]"
    spans: tuple[Span, ...]
    block_size: int
    seed: Key


class LearnedImage(NamedTuple):
    """An image whose sentinels a sighting or a request of the router's own has shown."""

    identity: bytes
    values: Values


@dataclass(slots=True)
class _PlaceRecord:
    """Requested images and sightings of one place: (tokens, when) by image, (tokens seen, when) by sentinels."""

    requested: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    seen: dict[Values, tuple[int, int]] = field(default_factory=dict)


class Aligner:
    """One rank of one engine in one epoch. ``lost`` is true once evicted state makes conclusions unsafe."""

    def __init__(self, table: SentinelTable, *, max_places: int = MAX_PLACES) -> None:
        self._table, self._max_places = table, max_places
        self._records: OrderedDict[Place, _PlaceRecord] = OrderedDict()
        # Requests with an image without a place: the number of that image's span, and when the request was sent.
        self._open: deque[tuple[SentRequest, int, int]] = deque()
        self._now = 0
        self._version = table.version
        self.lost = False

    def add_request(self, request: SentRequest) -> list[LearnedImage]:
        """Record a request before it is sent; returns images learned meanwhile."""
        learned = self.resolve()
        self._now += 1
        self._place(request, 0, self._now)
        return learned

    def add_sighting(self, place: Place, values: Values, length: int, *, trusted: bool) -> list[LearnedImage]:
        """Record a sighting. ``trusted``: only this router has sent images to the engine."""
        learned = self.resolve()
        if not trusted:
            return learned
        record = self._at(place)
        self._now += 1
        record.seen.setdefault(values, (length, self._now))
        return learned + self._settle(record)

    def resolve(self) -> list[LearnedImage]:
        """Place images that newly learned ones precede, and settle them by earlier sightings."""
        return [image for record in self._reopen() for image in self._settle(record)]

    def ambiguous(self, place: Place) -> bool:
        record = self._records.get(place)
        return record is not None and len(self._unproven(record)) > 1

    def _reopen(self) -> list[_PlaceRecord]:
        """Place images of open requests that follow newly learned ones; return the records of these places."""
        if self._version == self._table.version:
            return []
        self._version = self._table.version
        waiting, self._open = self._open, deque()
        # Place all of them before any is settled: a sighting is unambiguous only among all requested images.
        placed: list[_PlaceRecord] = []
        for request, number, at in waiting:
            if any(self._table.get(span.identity) is None for span in request.spans[:number]):
                self._open.append((request, number, at))
            else:
                placed += self._place(request, number, at)
        return placed

    def _place(self, request: SentRequest, first: int, at: int) -> list[_PlaceRecord]:
        placed: list[_PlaceRecord] = []
        for number, (span, place) in enumerate(places(request, self._table)):
            if number < first:
                continue
            if place is None:
                self._open.append((request, number, at))
                if len(self._open) > MAX_OPEN:
                    self._open.popleft()
                    self.lost = True
                break
            if not self._table.is_proven(span.identity):
                record = self._at(place)
                record.requested.setdefault(span.identity, (span.run, at))
                placed.append(record)
        return placed

    def _settle(self, record: _PlaceRecord) -> list[LearnedImage]:
        unproven = self._unproven(record)
        learned: list[LearnedImage] = []
        for identity in unproven:
            predicted = self._table.get(identity)
            if predicted is not None and predicted.values in record.seen:
                learned.append(LearnedImage(identity, predicted.values))  # a sighted prediction is a proof
        if learned:
            return learned
        unowned = [values for values in record.seen if not self._table.owned(values)]
        if len(unproven) != 1 or len(unowned) != 1:
            return []
        (tokens, requested_at), (length, seen_at) = record.requested[unproven[0]], record.seen[unowned[0]]
        if seen_at < requested_at:
            return []  # seen before the request was sent, so it is another image
        # Too short to show the whole cycle, or longer than the image, which then is another image to the router.
        if length < min(ENOUGH, tokens) or length > tokens:
            return []
        return [LearnedImage(unproven[0], unowned[0])]

    def _unproven(self, record: _PlaceRecord) -> list[bytes]:
        return [identity for identity in record.requested if not self._table.is_proven(identity)]

    def _at(self, place: Place) -> _PlaceRecord:
        record = self._records.get(place)
        if record is None:
            record = self._records[place] = _PlaceRecord()
            if len(self._records) > self._max_places:
                _, evicted = self._records.popitem(last=False)
                self.lost = self.lost or bool(self._unproven(evicted))
        else:
            self._records.move_to_end(place)
        return record


def places(request: SentRequest, table: SentinelTable) -> Iterator[tuple[Span, Place | None]]:
    """Yield each image's span and place; ``None`` from the first that starts after an unknown block."""

    def values_of(identity: bytes) -> Values | None:
        entry = table.get(identity)
        return entry.values if entry is not None else None

    size = request.block_size
    filled = fill_sentinels(request.ids, request.spans, values_of)
    limit = len(request.ids) if filled.unknown is None else request.spans[filled.unknown].offset
    # Complete known blocks that any span's place needs.
    last = max((s.offset // size for s in request.spans if s.offset // size * size <= limit), default=0)
    keys: Sequence[Key] = block_keys(filled.ids[: last * size], size, (), request.seed)
    for span in request.spans:
        before = span.offset // size
        if before > last:
            yield span, None
        else:
            yield span, (keys[before - 1] if before else None, span.offset % size)
