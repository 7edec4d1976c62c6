"""Bounded table from images to sentinels; writes them into token ids, reads them back from published blocks. Pure."""

import secrets
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.base.events import Stored
from mmrouter_lib.engines.sglang.identity import SENTINEL_BASE, WIDE_SENTINELS, run_ids

Scope = tuple[str, str]  # engine version and pool: what an image's sentinels depend on besides the image

Values = tuple[int, ...]  # the sentinels of one image, in the order in which they cycle from the start of its run

MAX_IMAGES = 65_536


class ImageSentinels(NamedTuple):
    """An image's sentinels. ``proven``: an engine of the scope was seen to use them; else they are predicted."""

    values: Values
    proven: bool


class SentinelTable:
    """Sentinels of the images of one scope. ``version`` changes whenever a lookup may have a new result."""

    def __init__(self, size: int = MAX_IMAGES) -> None:
        self._size = size
        self._images: OrderedDict[bytes, ImageSentinels] = OrderedDict()
        self._proven: Counter[Values] = Counter()
        self.version = 0

    def __len__(self) -> int:
        return len(self._images)

    def get(self, identity: bytes) -> ImageSentinels | None:
        entry = self._images.get(identity)
        if entry is not None:
            self._images.move_to_end(identity)
        return entry

    def is_proven(self, identity: bytes) -> bool:
        entry = self.get(identity)
        return entry is not None and entry.proven

    def put(self, identity: bytes, values: Values, *, proven: bool) -> None:
        """Set an image's sentinels; a prediction never replaces a proof."""
        old = self._images.pop(identity, None)
        if old is not None and old.proven:
            if not proven:
                self._images[identity] = old
                return
            self._release(old.values)
        self._images[identity] = ImageSentinels(values, proven)
        if proven:
            self._proven[values] += 1
        if old is None or old.values != values:
            self.version += 1
        if len(self._images) > self._size:
            _, evicted = self._images.popitem(last=False)
            if evicted.proven:
                self._release(evicted.values)

    def owned(self, values: Values) -> bool:
        return values in self._proven

    def forget_predictions(self) -> None:
        for identity in [identity for identity, entry in self._images.items() if not entry.proven]:
            del self._images[identity]
        self.version += 1

    def _release(self, values: Values) -> None:
        self._proven[values] -= 1
        if not self._proven[values]:
            del self._proven[values]


_UNUSED = 1 << 63  # no engine writes an id from here on: sentinels end at 2^62 + 10^6


class FilledPrompt(NamedTuple):
    """A prompt as the engine has it: u64 ids; ``unknown`` is the number of the first span without known sentinels."""

    ids: "array[int]"
    unknown: int | None


def fill_sentinels(
    ids: Sequence[int], spans: Sequence[Span], values_of: Callable[[bytes], Values | None]
) -> FilledPrompt:
    """Write sentinels over spans (in prompt order) up to the first unknown image, whose random values never match."""
    filled = array("Q", ids)
    for number, span in enumerate(spans):
        values = values_of(span.identity)
        if not values:
            for at in range(span.offset, span.end):
                filled[at] = _UNUSED | secrets.randbits(63)
            return FilledPrompt(filled, number)
        run = run_ids(values, span.run)
        for start in span.starts:
            filled[start : start + span.run] = run
    return FilledPrompt(filled, None)


def observe_sentinels(ids: Sequence[int], span: Span, block_size: int, published: Sequence[Stored]) -> Values | None:
    """Return the sentinels at an image's place in a published prompt, ``None`` where they were not published.

    ``ids``: with plain placeholders. The block before the image is text that is unique to this request.
    """
    enough = min(WIDE_SENTINELS, span.run)
    before = array("Q", ids[max(0, span.offset - 2 * block_size) : span.offset])
    for run in _joined(published):
        for at in range(len(run) - enough + 1):
            size = min(at, len(before))
            if size < block_size or run[at] < SENTINEL_BASE or run[at - size : at] != before[len(before) - size :]:
                continue
            values = tuple(run[at : at + enough])
            if min(values) < SENTINEL_BASE:
                return None  # the engine gives the image fewer tokens than predicted
            return values[:1] if len(set(values)) == 1 else values
    return None


def _joined(published: Sequence[Stored]) -> list["array[int]"]:
    """Return each event's ids, preceded by those of its parent blocks where they were published, too."""
    runs: list[array[int]] = []
    upto: dict[int, array[int]] = {}
    for event in published:
        if not event.hashes:
            continue
        ids = array("Q", event.ids)
        if event.parent is not None and event.parent in upto:
            ids = upto[event.parent] + ids
        runs.append(ids)
        size, start = event.block_size, len(ids) - len(event.ids)
        for number, name in enumerate(event.hashes, 1):
            end = start + number * size
            upto[name] = ids[max(0, end - 3 * size) : end]
    return runs
