"""State of the feed's current epoch: recent deltas, recent raw batches, and the canary claim. Pure; no I/O."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from mmrouter_lib.feed import (
    Accepted,
    CanaryClaim,
    CanaryReport,
    CanaryResult,
    ClaimAnswer,
    Delta,
    DetailPart,
    RawBatch,
    Refused,
    ReplayPart,
)

MAX_BYTES = 64 << 20
PART_ITEMS = 256
PART_BYTES = 4 << 20
MAX_LEASE_S = 120.0


class DeltaHistory:
    """The last deltas of the epoch, bounded by count and bytes."""

    def __init__(self, items: int) -> None:
        self._items = items
        self.clear(0)

    def clear(self, seq: int) -> None:
        """Drop everything; the next delta is number ``seq + 1``."""
        self._deltas: deque[Delta] = deque()
        self._bytes = 0
        self.seq = seq

    def append(self, delta: Delta) -> None:
        """Append a delta and drop the oldest beyond the bounds."""
        self._deltas.append(delta)
        self.seq = delta.seq
        self._bytes += _weight(delta)
        while len(self._deltas) > self._items or self._bytes > MAX_BYTES:
            self._bytes -= _weight(self._deltas.popleft())

    def replay(self, request_id: int, first: int) -> Iterator[ReplayPart]:
        """Yield the deltas from ``first`` on, or a part marked ``gone``."""
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


class BatchHistory:
    """The last event batches as the engine sent them. Batches of deltas up to ``floor`` may be missing."""

    def __init__(self, items: int) -> None:
        self._items = items
        self.clear(0)

    def clear(self, seq: int) -> None:
        """Drop everything; the batches of deltas up to number ``seq`` are unknown."""
        self._batches: deque[RawBatch] = deque()
        self._bytes = 0
        self.floor = seq

    def append(self, batch: RawBatch) -> None:
        """Append a batch and drop the oldest beyond the bounds."""
        self._batches.append(batch)
        self._bytes += len(batch.payload)
        while len(self._batches) > self._items or self._bytes > MAX_BYTES:
            old = self._batches.popleft()
            self._bytes -= len(old.payload)
            self.floor = old.seq

    def detail(self, request_id: int, first: int, end: int) -> Iterator[DetailPart]:
        """Yield the batches behind the deltas ``first`` .. ``end``."""
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


@dataclass(slots=True)
class EpochCanary:
    """The canary of one epoch (docs/exactness.md): one router holds the claim; the first definite result stays."""

    epoch: int
    result: CanaryReport | None = None
    _holder: str = ""
    _until: float = field(default=0.0)

    def begin(self, epoch: int) -> None:
        """Reset for a new epoch."""
        self.epoch, self.result, self._holder, self._until = epoch, None, "", 0.0

    def claim(self, request: CanaryClaim, now: float) -> ClaimAnswer | Refused:
        """Grant the claim unless another router holds it or there is a definite result. ``now``: monotonic seconds."""
        if request.epoch != self.epoch:
            return Refused(request.id, f"epoch {request.epoch} is not the present one, {self.epoch}")
        if self._decided:
            return ClaimAnswer(request.id, False, self.result.router if self.result else "")
        if self._holder not in ("", request.router) and now < self._until:
            return ClaimAnswer(request.id, False, self._holder)
        self._holder, self._until = request.router, now + min(max(request.lease_s, 0.0), MAX_LEASE_S)
        return ClaimAnswer(request.id, True, request.router)

    def report(self, answer: CanaryResult, now: float) -> Accepted | Refused:
        """Accept a result from the current or last holder of the claim."""
        canary = answer.canary
        if canary.epoch != self.epoch:
            return Refused(answer.id, f"epoch {canary.epoch} is not the present one, {self.epoch}")
        if self._decided:
            return Refused(answer.id, "this epoch has its result already")
        if self._holder != canary.router:
            holder = f"{self._holder} holds it" if self._holder and now < self._until else "it is free"
            return Refused(answer.id, f"{canary.router} does not hold the claim: {holder}")
        self.result, self._holder, self._until = canary, "", 0.0
        return Accepted(answer.id)

    @property
    def _decided(self) -> bool:
        return self.result is not None and self.result.result != "Unknown"
