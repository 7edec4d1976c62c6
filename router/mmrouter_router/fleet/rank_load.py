"""What requests occupy on one rank of an engine, as far as this router knows."""

from array import array
from collections.abc import Iterable
from typing import NamedTuple


class Theirs(NamedTuple):
    """What another router has on a rank, in blocks, and when it said so."""

    requests: int
    prefill: float
    active: float
    at: float


class Loads:
    """What a decision asks of every rank, as columns with a row for each; a rank's :class:`Usage` keeps its row right.

    A decision looks at all ranks and a request changes one, so sums are made where something changes.
    """

    def __init__(self) -> None:
        # Not lists: neighbours lie beside each other in memory, and a copy of them is one of bytes.
        self.unanswered = array("l")
        self.prefill = array("d")  # of all routers, blocks
        self.active = array("d")
        self.others = array("d")
        self._free: list[int] = []

    def join(self) -> int:
        """Return the number of a row of zeros."""
        if self._free:
            return self._free.pop()
        for column in (self.unanswered, self.prefill, self.active, self.others):
            column.append(0)
        return len(self.unanswered) - 1

    def leave(self, row: int) -> None:
        """Give a row back."""
        for column in (self.unanswered, self.prefill, self.active, self.others):
            column[row] = 0
        self._free.append(row)


class Usage:
    """What requests occupy on one rank, this router's own in blocks. It changes by its methods only.

    A key is ``promised`` by the request that was the first to be sent there with it, until the engine tells that it
    holds the block, the request has its first byte or is over. It is one set for as long as the usage lives.

    ``theirs``: router -> what that one says it has there; the sums of it stand beside our own.
    """

    __slots__ = (
        "_loads",
        "active",
        "encode",
        "others",
        "promised",
        "requests",
        "row",
        "their_active",
        "their_prefill",
        "their_requests",
        "theirs",
        "unanswered",
    )

    def __init__(self, loads: Loads) -> None:
        """Take a row of the columns, until :meth:`leave`."""
        self._loads = loads
        self.row = loads.join()
        self.requests = 0
        self.unanswered = 0  # of them, those without a first byte
        self.promised: set[int] = set()  # keys that requests have yet to compute
        self.encode = 0.0  # of images that are not encoded yet
        self.active = 0.0
        self.others = 0.0  # requests that queue in the engine and that no router has told of
        self.theirs: dict[str, Theirs] = {}
        self.their_requests = 0
        self.their_prefill = 0.0
        self.their_active = 0.0

    @property
    def prefill(self) -> float:
        """Blocks of this router that wait to be computed."""
        return len(self.promised) + self.encode

    def begin(self, fresh: Iterable[int], encode: float, active: float) -> None:
        """Count a request: keys of the blocks that it has computed, blocks that its images are worth, its prompt's."""
        self.requests += 1
        self.unanswered += 1
        self.promised.update(fresh)
        self.encode += encode
        self.active += active
        self._note()

    def answered(self) -> None:
        """A request has its first byte."""
        self.unanswered -= 1
        self._note()

    def computed(self, fresh: Iterable[int], encode: float) -> None:
        """What a request began with is not awaited any more."""
        self.promised.difference_update(fresh)
        self.encode -= encode
        self._note()

    def end(self, active: float) -> None:
        """A request that was answered and computed is over."""
        self.requests -= 1
        self.active -= active
        if not self.requests:
            self.encode = 0.0  # sums of fractions do not end at 0 by themselves
        self._note()

    def stored(self, keys: Iterable[int]) -> None:
        """The engine holds these blocks now."""
        self.promised.difference_update(keys)
        self._note()

    def forget(self) -> None:
        """Whatever was to be computed there ended with what was."""
        self.promised.clear()
        self._note()

    def queue(self, waiting: float) -> None:
        """Take the engine's word for how many requests wait there: only a queue that somebody else made is news."""
        self.others = max(0.0, waiting - self.requests - self.their_requests)
        self._note()

    def add_up(self) -> None:
        """Sum up what the other routers have."""
        rows = self.theirs.values()
        self.their_requests = sum(row.requests for row in rows)
        self.add(sum(row.prefill for row in rows), sum(row.active for row in rows))

    def add(self, prefill: float, active: float) -> None:
        """Take these for what the other routers have."""
        self.their_prefill, self.their_active = prefill, active
        self._note()

    def leave(self) -> None:
        """The rank is gone: its row is somebody else's, and requests that end later change nothing there."""
        self._loads.leave(self.row)
        self._loads = Loads()
        self.row = self._loads.join()
        self._note()

    def _note(self) -> None:
        loads, row = self._loads, self.row
        loads.unanswered[row] = self.unanswered
        loads.prefill[row] = self.prefill + self.their_prefill
        loads.active[row] = self.active + self.their_active
        loads.others[row] = self.others
