"""Bounded memories of what was sent: deltas for ``replay``, raw engine batches for ``detail``. Pure; no I/O."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from mmrouter_lib.feed import Delta, DetailPart, RawBatch, ReplayPart

MAX_BYTES = 64 << 20
PART_ITEMS = 256
PART_BYTES = 4 << 20


class DeltaRing:
    """The last deltas of the present epoch, by count and by bytes."""

    def __init__(self, items: int) -> None:
        self._items = items
        self.clear(0)

    def clear(self, seq: int) -> None:
        """Forget everything; the next delta is number ``seq + 1``."""
        self._deltas: deque[Delta] = deque()
        self._bytes = 0
        self.seq = seq

    def append(self, delta: Delta) -> None:
        """Keep a delta; the oldest ones go."""
        self._deltas.append(delta)
        self.seq = delta.seq
        self._bytes += _weight(delta)
        while len(self._deltas) > self._items or self._bytes > MAX_BYTES:
            self._bytes -= _weight(self._deltas.popleft())

    def replay(self, request_id: int, first: int) -> Iterator[ReplayPart]:
        """Answer with the deltas from ``first`` on, or with ``gone``."""
        oldest = self.seq - len(self._deltas) + 1
        if first < oldest or first < 1:
            yield ReplayPart(request_id, (), last=True, gone=True)
            return
        part: list[Delta] = []
        size = 0
        for delta in islice(self._deltas, first - oldest, None):
            part.append(delta)
            size += _weight(delta)
            if len(part) >= PART_ITEMS or size >= PART_BYTES:
                yield ReplayPart(request_id, tuple(part), last=False)
                part, size = [], 0
        yield ReplayPart(request_id, tuple(part), last=True)


class RawRing:
    """The last event batches as the engine sent them. ``floor`` is the highest number of which some may be missing."""

    def __init__(self, items: int) -> None:
        self._items = items
        self.clear(0)

    def clear(self, seq: int) -> None:
        """Forget everything; what led to deltas up to number ``seq`` is not known."""
        self._batches: deque[RawBatch] = deque()
        self._bytes = 0
        self.floor = seq

    def append(self, batch: RawBatch) -> None:
        """Keep a batch; the oldest ones go."""
        self._batches.append(batch)
        self._bytes += len(batch.payload)
        while len(self._batches) > self._items or self._bytes > MAX_BYTES:
            old = self._batches.popleft()
            self._bytes -= len(old.payload)
            self.floor = old.seq

    def detail(self, request_id: int, first: int, end: int) -> Iterator[DetailPart]:
        """Answer with the batches behind the deltas ``first`` .. ``end``."""
        gone = first <= self.floor
        part: list[RawBatch] = []
        size = 0
        for batch in self._batches:
            if not first <= batch.seq <= end:
                continue
            part.append(batch)
            size += len(batch.payload)
            if len(part) >= PART_ITEMS or size >= PART_BYTES:
                yield DetailPart(request_id, tuple(part), last=False, gone=gone)
                part, size = [], 0
        yield DetailPart(request_id, tuple(part), last=True, gone=gone)


def _weight(delta: Delta) -> int:
    return len(delta.stored) + len(delta.removed) + 64
