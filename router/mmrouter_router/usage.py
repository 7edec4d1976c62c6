"""What requests occupy on one rank of an engine, as far as this router knows."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Theirs(NamedTuple):
    """What another router has on a rank, in blocks, and when it said so."""

    requests: int
    prefill: float
    active: float
    at: float


@dataclass(slots=True)
class Usage:
    """What requests occupy on one rank, this router's own in blocks; ``promised``: keys that it has yet to compute.

    ``theirs``: router -> what that one says it has there; the sums of it stand beside our own.

    A key is promised by the request that was the first to be sent there with it, until the engine tells that it holds
    the block, the request has its first byte or is over.
    """

    requests: int = 0
    unanswered: int = 0  # of them, those without a first byte
    promised: set[int] = field(default_factory=set)
    encode: float = 0.0  # of images that are not encoded yet
    active: float = 0.0
    others: float = 0.0  # requests that queue in the engine and that no router has told of
    theirs: dict[str, Theirs] = field(default_factory=dict)
    their_requests: int = 0
    their_prefill: float = 0.0
    their_active: float = 0.0

    @property
    def prefill(self) -> float:
        """Blocks of this router that wait to be computed."""
        return len(self.promised) + self.encode

    def add_up(self) -> None:
        """Sum up what the other routers have."""
        rows = self.theirs.values()
        self.their_requests = sum(row.requests for row in rows)
        self.their_prefill = sum(row.prefill for row in rows)
        self.their_active = sum(row.active for row in rows)
