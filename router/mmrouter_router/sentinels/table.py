"""Image -> sentinels, bounded, the image that was not asked for the longest goes first. Pure."""

from collections import Counter, OrderedDict
from typing import NamedTuple

Values = tuple[int, ...]
"""The sentinels of one image, in the order in which they cycle from the start of its run."""

MAX_IMAGES = 65_536


class Known(NamedTuple):
    """What an image's sentinels are. ``proven``: an engine of the scope was seen to use them; else predicted."""

    values: Values
    proven: bool


class Table:
    """Sentinels of the images of one scope. ``version`` changes whenever a lookup may answer something new."""

    def __init__(self, size: int = MAX_IMAGES) -> None:
        self._size = size
        self._known: OrderedDict[bytes, Known] = OrderedDict()
        self._proven: Counter[Values] = Counter()
        self.version = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, identity: bytes) -> Known | None:
        """Return what is known of an image, which keeps it in the table."""
        known = self._known.get(identity)
        if known is not None:
            self._known.move_to_end(identity)
        return known

    def put(self, identity: bytes, values: Values, *, proven: bool) -> None:
        """Set what an image's sentinels are; what was proven stays proven until it is proven to be something else."""
        old = self._known.pop(identity, None)
        if old is not None and old.proven:
            if not proven:
                self._known[identity] = old
                return
            self._release(old.values)
        self._known[identity] = Known(values, proven)
        if proven:
            self._proven[values] += 1
        if old is None or old.values != values:
            self.version += 1
        if len(self._known) > self._size:
            _, gone = self._known.popitem(last=False)
            if gone.proven:
                self._release(gone.values)

    def owned(self, values: Values) -> bool:
        """Whether an image in the table is proven to have these sentinels."""
        return values in self._proven

    def forget_predictions(self) -> None:
        """Drop everything that no engine was seen to use."""
        for identity in [identity for identity, known in self._known.items() if not known.proven]:
            del self._known[identity]
        self.version += 1

    def _release(self, values: Values) -> None:
        self._proven[values] -= 1
        if not self._proven[values]:
            del self._proven[values]
