"""Load of one engine rank: requests of this router and its peers, in blocks."""

from array import array
from collections.abc import Iterable
from typing import NamedTuple


class PeerUsage(NamedTuple):
    """Load of another router on a rank, in blocks, and when its frame arrived."""

    requests: int
    prefill: float
    active: float
    at: float


class LoadColumns:
    """Loads of all ranks as columns, summed on change: a decision reads every rank, a request changes one."""

    def __init__(self) -> None:
        # Arrays keep the values contiguous, so a slice is one copy of bytes.
        self.unanswered = array("l")
        self.prefill = array("d")  # of all routers, blocks
        self.active = array("d")
        self.others = array("d")
        self._free: list[int] = []

    def join(self) -> int:
        if self._free:
            return self._free.pop()
        for column in (self.unanswered, self.prefill, self.active, self.others):
            column.append(0)
        return len(self.unanswered) - 1

    def leave(self, row: int) -> None:
        for column in (self.unanswered, self.prefill, self.active, self.others):
            column[row] = 0
        self._free.append(row)


class RankUsage:
    """Load of one rank, in blocks. Change it only by its methods: they keep the columns in step.

    A key is ``promised`` by the first request that was sent there with it, until the engine reports the block stored
    or the request has its first byte or ends. ``peers``: router id -> its load, summed in the ``peer_`` attributes.
    """

    def __init__(self, loads: LoadColumns) -> None:
        self._loads = loads
        self.row = loads.join()
        self.requests = 0
        self.unanswered = 0  # of them, those without a first byte
        self.promised: set[int] = set()  # keys that requests have yet to compute
        self.encode = 0.0  # of images that are not encoded yet
        self.active = self.peer_prefill = self.peer_active = 0.0
        self.others = 0.0  # requests in the engine's queue that no router accounts for
        self.kv_usage = 0.0  # of requests that the engine runs; no term of the score
        self.peers: dict[str, PeerUsage] = {}
        self.peer_requests = 0

    @property
    def prefill(self) -> float:
        """Blocks of this router that wait to be computed."""
        return len(self.promised) + self.encode

    def begin(self, fresh: Iterable[int], encode: float, active: float) -> None:
        """Count a request: keys of the blocks to compute, cost of its images in blocks, and blocks of its prompt."""
        self.requests += 1
        self.unanswered += 1
        self.promised.update(fresh)
        self.encode += encode
        self.active += active
        self._update_row()

    def answered(self) -> None:
        self.unanswered -= 1
        self._update_row()

    def computed(self, fresh: Iterable[int], encode: float = 0.0) -> None:
        """Remove blocks that are no longer promised, and the image cost that a request began with."""
        self.promised.difference_update(fresh)
        self.encode -= encode
        self._update_row()

    def end(self, active: float) -> None:
        self.requests -= 1
        self.active -= active
        if not self.requests:
            self.encode = 0.0  # sums of fractions do not return to 0 exactly
        self._update_row()

    def clear_pending(self) -> None:
        self.promised.clear()
        self._update_row()

    def queue(self, waiting: float, kv_usage: float = 0.0) -> None:
        """Take the engine's queue length and the share of its KV memory in use, 0 to 1.

        Only requests that no router accounts for are added load.
        """
        self.kv_usage = kv_usage
        self.others = max(0.0, waiting - self.requests - self.peer_requests)
        self._update_row()

    def sum_peers(self) -> None:
        rows = self.peers.values()
        self.peer_requests = sum(row.requests for row in rows)
        self.set_peers(sum(row.prefill for row in rows), sum(row.active for row in rows))

    def set_peers(self, prefill: float, active: float) -> None:
        self.peer_prefill, self.peer_active = prefill, active
        self._update_row()

    def leave(self) -> None:
        """Free the row of a rank that is gone; requests that end later write to a detached one."""
        self._loads.leave(self.row)
        self._loads = LoadColumns()
        self.row = self._loads.join()
        self._update_row()

    def _update_row(self) -> None:
        loads, row = self._loads, self.row
        loads.unanswered[row] = self.unanswered
        loads.prefill[row] = self.prefill + self.peer_prefill
        loads.active[row] = self.active + self.peer_active
        loads.others[row] = self.others
