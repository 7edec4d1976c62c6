"""State of the feed's current epoch: recent deltas, recent raw batches, and the canary claim. Pure; no I/O."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from mmrouter_lib.feed import Accepted, CanaryClaim, CanaryReport, CanaryResult, ClaimAnswer, Delta, RawBatch, Refused

MAX_BYTES = 64 << 20
PART_ITEMS = 256
PART_BYTES = 4 << 20
MAX_LEASE_S = 120.0


T = TypeVar("T", Delta, RawBatch)


class History(Generic[T]):
    """The last deltas or raw batches of the epoch, bounded by count and bytes.

    ``floor``: those of deltas up to this number may be missing.
    """

    def __init__(self, items: int) -> None:
        self._items = items
        self.clear(0)

    def clear(self, seq: int) -> None:
        """Drop everything; the items of deltas up to number ``seq`` are unknown."""
        self._held: deque[T] = deque()
        self._bytes = 0
        self.floor = seq

    def append(self, item: T) -> None:
        self._held.append(item)
        self._bytes += _bytes(item)
        while len(self._held) > self._items or self._bytes > MAX_BYTES:
            old = self._held.popleft()
            self._bytes -= _bytes(old)
            self.floor = old.seq

    def parts(self, first: int, end: int | None = None) -> Iterator[tuple[tuple[T, ...], bool]]:
        """Yield those of the deltas ``first`` .. ``end`` in parts of bounded size, and whether a part is the last."""
        part: list[T] = []
        size = 0
        for item in self._held:
            if item.seq < first or (end is not None and item.seq > end):
                continue
            part.append(item)
            size += _bytes(item)
            if len(part) >= PART_ITEMS or size >= PART_BYTES:
                yield tuple(part), False
                part, size = [], 0
        yield tuple(part), True


def _bytes(item: Delta | RawBatch) -> int:
    return len(item.payload) if isinstance(item, RawBatch) else len(item.stored) + len(item.removed) + 64


@dataclass(slots=True)
class EpochCanary:
    """The canary of one epoch (docs/exactness.md): one router holds the claim; the first definite result stays."""

    epoch: int
    result: CanaryReport | None = None
    _holder: str = ""
    _until: float = 0.0

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
