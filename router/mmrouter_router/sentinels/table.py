"""Bounded table from images to sentinels, least recently used out first. Pure."""

from collections import Counter, OrderedDict
from typing import NamedTuple

Values = tuple[int, ...]
"""The sentinels of one image, in the order in which they cycle from the start of its run."""

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
        """Return an image's sentinels and mark them as used."""
        entry = self._images.get(identity)
        if entry is not None:
            self._images.move_to_end(identity)
        return entry

    def is_proven(self, identity: bytes) -> bool:
        """Whether an image's sentinels are proven; marks them as used."""
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
        """Whether an image in the table is proven to have these sentinels."""
        return values in self._proven

    def forget_predictions(self) -> None:
        """Drop all entries that are not proven."""
        for identity in [identity for identity, entry in self._images.items() if not entry.proven]:
            del self._images[identity]
        self.version += 1

    def _release(self, values: Values) -> None:
        self._proven[values] -= 1
        if not self._proven[values]:
            del self._proven[values]
