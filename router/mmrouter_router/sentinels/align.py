"""Which image is it that an engine was just seen to store? Alignment of sightings with requests. Pure.

A *place* is where an image's run starts: the key of the block before, and the offset in its own block. Of a request the
places of all images are known before the engine answers, up to the first block that holds an unknown image; when that
one is learned, the next ones follow. A sighting names a place and the sentinels there. Only where exactly one image can
be meant is anything learned; whatever else could have been stored at the place makes it ambiguous, and that teaches
nothing. That holds as long as this router knows of every request with images that the engine got, so its owner says
when it does not (``trusted`` in :meth:`Aligner.sight`).
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mmrouter_lib.block_keys import Key, Span, block_keys
from mmrouter_router.sentinels.fill import fill
from mmrouter_router.sentinels.table import Table, Values

MAX_PLACES = 8_192
MAX_OPEN = 256
"""Requests kept because an image of theirs has no place yet."""
ENOUGH = 4
"""Tokens of a run that show its whole cycle."""

Place = tuple[Key | None, int]
"""Where a run starts: key of the block before its own (``None``: its own is the first), and the offset in its own."""


class Asked(NamedTuple):
    """A request as it was sent: its prompt with plain placeholders, and where its images stand."""

    ids: "array[int]"
    spans: tuple[Span, ...]
    block_size: int
    seed: Key


class Lesson(NamedTuple):
    """An image of which an engine's sentinels are now known."""

    identity: bytes
    values: Values


@dataclass(slots=True)
class _Here:
    """What was asked for and seen at one place: (tokens, when) by image, (tokens seen, when) by sentinels."""

    asked: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    seen: dict[Values, tuple[int, int]] = field(default_factory=dict)


class Aligner:
    """One rank of one engine in one epoch. ``lost`` is true once something was forgotten that could matter."""

    def __init__(self, table: Table, *, max_places: int = MAX_PLACES, max_open: int = MAX_OPEN) -> None:
        self._table = table
        self._max_places, self._max_open = max_places, max_open
        self._here: OrderedDict[Place, _Here] = OrderedDict()
        self._open: deque[tuple[Asked, int, int]] = deque()  # with the number of its first span without a place, when
        self._now = 0
        self._version = table.version
        self.lost = False

    def ask(self, request: Asked) -> list[Lesson]:
        """Note a request before it is sent."""
        lessons = self.follow()
        self._now += 1
        self._place(request, 0, self._now)
        return lessons

    def sight(self, place: Place, values: Values, length: int, *, trusted: bool) -> list[Lesson]:
        """Take what was seen at a place; ``trusted``: nobody else has sent images there."""
        lessons = self.follow()
        if not trusted:
            return lessons
        here = self._at(place)
        self._now += 1
        here.seen.setdefault(values, (length, self._now))
        return lessons + self._settle(here)

    def follow(self) -> list[Lesson]:
        """Go on after something was learned: images that have a place now may have been seen there already."""
        return [lesson for here in self._reopen() for lesson in self._settle(here)]

    def ambiguous(self, place: Place) -> bool:
        """Whether several images that are not known yet were asked for at a place."""
        here = self._here.get(place)
        return here is not None and sum(1 for _ in self._unproven(here)) > 1

    def _reopen(self) -> list[_Here]:
        """Give places to the images of earlier requests that follow what was learned since; return these places."""
        if self._version == self._table.version:
            return []
        self._version = self._table.version
        waiting, self._open = self._open, deque()
        # All of them first: what was seen at a place can only be told apart when everything asked for there is known.
        placed: list[_Here] = []
        for request, number, at in waiting:
            if any(self._table.get(span.identity) is None for span in request.spans[:number]):
                self._open.append((request, number, at))  # what it waits for is still not known: nothing to compute
            else:
                placed += self._place(request, number, at)
        return placed

    def _place(self, request: Asked, first: int, asked_at: int) -> list[_Here]:
        placed: list[_Here] = []
        for number, (span, place) in enumerate(places(request, self._table)):
            if number < first:
                continue
            if place is None:
                self._open.append((request, number, asked_at))
                if len(self._open) > self._max_open:
                    self._open.popleft()
                    self.lost = True
                break
            known = self._table.get(span.identity)
            if known is None or not known.proven:
                here = self._at(place)
                here.asked.setdefault(span.identity, (span.length, asked_at))
                placed.append(here)
        return placed

    def _settle(self, here: _Here) -> list[Lesson]:
        unproven = list(self._unproven(here))
        found: list[Lesson] = []
        for identity in unproven:
            known = self._table.get(identity)
            if known is not None and known.values in here.seen:
                found.append(Lesson(identity, known.values))  # as predicted: the values themselves are the proof
        if found:
            return found
        strange = [values for values in here.seen if not self._table.owned(values)]
        if len(unproven) != 1 or len(strange) != 1:
            return []
        (tokens, asked_at), (length, seen_at) = here.asked[unproven[0]], here.seen[strange[0]]
        if seen_at < asked_at:
            return []  # whatever it was, it was not this image
        # Too short to show the whole cycle, or longer than the image: another count than ours, so another image to us.
        if length < min(ENOUGH, tokens) or length > tokens:
            return []
        return [Lesson(unproven[0], strange[0])]

    def _unproven(self, here: _Here) -> Iterator[bytes]:
        for identity in here.asked:
            known = self._table.get(identity)
            if known is None or not known.proven:
                yield identity

    def _at(self, place: Place) -> _Here:
        here = self._here.get(place)
        if here is None:
            here = self._here[place] = _Here()
            if len(self._here) > self._max_places:
                _, gone = self._here.popitem(last=False)
                self.lost = self.lost or any(True for _ in self._unproven(gone))
        else:
            self._here.move_to_end(place)
        return here


def places(request: Asked, table: Table) -> Iterator[tuple[Span, Place | None]]:
    """Yield every image's span and place; ``None`` from the first that starts behind a block that is not known."""

    def values_of(identity: bytes) -> Values | None:
        known = table.get(identity)
        return known.values if known is not None else None

    size = request.block_size
    filled = fill(request.ids, request.spans, values_of)
    limit = len(request.ids) if filled.unknown is None else request.spans[filled.unknown].offset
    last = _blocks_before(request.spans, size, limit)
    keys: Sequence[Key] = block_keys(filled.ids[: last * size], size, (), request.seed)
    for span in request.spans:
        before = span.offset // size
        if before > last:
            yield span, None
        else:
            yield span, (keys[before - 1] if before else None, span.offset % size)


def _blocks_before(spans: Sequence[Span], size: int, limit: int) -> int:
    """Number of complete known blocks that any span's place needs."""
    return max((span.offset // size for span in spans if span.offset // size * size <= limit), default=0)
