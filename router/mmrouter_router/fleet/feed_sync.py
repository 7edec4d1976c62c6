"""Order one sidecar's feed: which deltas to apply, what to request, when the index equals the engine's cache. Pure.

Frames of two sockets arrive in any order. Deltas before the snapshot wait; a snapshot at (epoch, seq) absorbs those up
to ``seq``; a gap requests a replay, a replay that is gone a snapshot; a new epoch or worker id empties everything.
"""

from dataclasses import dataclass, field
from typing import Literal

from mmrouter_lib.feed import Delta, Heartbeat, ReplayPart, ReplayRequest, SnapshotPart, SnapshotRequest

Step = Literal["reset", "synced"] | Delta | SnapshotPart | SnapshotRequest | ReplayRequest
"""Drop the index slots of every rank; the index now holds what the sidecar holds; apply a delta; add the keys of a part
of a snapshot; send a request, to which the answer to any older one is stale."""

OLDER_BEATS = 4  # heartbeats in a row after which a lower epoch is the present one; fewer may be late frames
MAX_WAITING = 10_000  # deltas kept during a snapshot or replay; beyond it a fresh snapshot is cheaper


@dataclass
class FeedSync:
    """State of one worker's feed. ``synced`` is true while the index equals the sidecar's stream without a gap."""

    worker: str = ""
    epoch: int = 0
    seq: int = 0
    synced: bool = False
    request_id: int = 0  # of the request under way, 0 for none
    _older_beats: int = 0  # in a row
    _next_id: int = 1  # odd numbers: requests of other callers have even ones
    _waiting: dict[int, Delta] = field(default_factory=dict)
    _parts: list[SnapshotPart] = field(default_factory=list)

    def start(self) -> list[Step]:
        """(Re)connect: the index counts as stale until a snapshot arrives."""
        self.synced = False
        self._waiting.clear()
        return [self._ask_snapshot()]

    def on_heartbeat(self, beat: Heartbeat) -> list[Step]:
        """Detect a new worker or epoch, and by a newer ``seq`` that the latest delta was lost; resync a stale feed.

        A frame of a lower epoch is a late one of an ended epoch, unless more of them follow: epochs are taken from the
        node's clock, which may have been set back before the sidecar started without its journal.
        """
        self._older_beats = self._older_beats + 1 if beat.epoch < self.epoch else 0
        if (beat.worker, beat.epoch) != (self.worker, self.epoch):
            if 0 < self._older_beats < OLDER_BEATS:
                return []
            return self._begin(beat.worker, beat.epoch)
        if self.request_id:
            return []
        if not self.synced:
            return [self._ask_snapshot()]
        return [self._ask_replay()] if beat.seq > self.seq else []

    def advance(self, delta: Delta) -> bool:
        """Take the next delta of a synced stream, the common case; false: unchanged, it goes to :meth:`on_delta`."""
        if self.synced and delta.seq == self.seq + 1 and delta.epoch == self.epoch and not self.request_id:
            self.seq = delta.seq
            return True
        return False

    def on_delta(self, delta: Delta) -> list[Step]:
        """Apply in order, keep for later, or ignore as already applied."""
        if delta.epoch < self.epoch:
            return []
        if delta.epoch > self.epoch:
            # The heartbeat with the new worker id follows; empty now rather than match a dead cache until then.
            steps = self._begin(self.worker, delta.epoch)
            self._waiting[delta.seq] = delta
            return steps
        if delta.seq <= self.seq and self.synced:
            return []
        if self.advance(delta):
            return [delta]
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.clear()
            return [self._ask_snapshot()]
        self._waiting[delta.seq] = delta
        if self.synced and not self.request_id:
            return [self._ask_replay()]
        return []

    def on_snapshot(self, part: SnapshotPart) -> list[Step]:
        """Collect parts; the last one replaces the worker's keys and continues with the waiting deltas."""
        if part.id != self.request_id or part.epoch < self.epoch:
            return []
        self._parts.append(part)
        if not part.last:
            return []
        parts, self._parts, self.request_id = self._parts, [], 0
        if any((p.epoch, p.seq) != (part.epoch, part.seq) for p in parts):
            return [self._ask_snapshot()]
        self.worker, self.epoch, self.seq, self.synced = part.worker, part.epoch, part.seq, True
        self._waiting = {seq: delta for seq, delta in self._waiting.items() if delta.epoch == part.epoch}
        return ["reset", *(p for p in parts if p.keys), *self._drain(), "synced"]

    def on_replay(self, part: ReplayPart) -> list[Step]:
        if part.id != self.request_id:
            return []
        if part.gone:
            self.synced = False
            return [self._ask_snapshot()]
        for delta in part.deltas:
            if delta.epoch == self.epoch and delta.seq > self.seq:
                self._waiting[delta.seq] = delta
        if not part.last:
            return []
        self.request_id = 0
        steps = self._drain()
        if not self.request_id:
            steps.append("synced")
        return steps

    def on_refused(self, answered_id: int) -> list[Step]:
        """Replace a request that the sidecar cannot answer any more (its epoch ended) by a snapshot."""
        if answered_id != self.request_id:
            return []
        self.synced = False
        return [self._ask_snapshot()]

    def on_silence(self) -> list[Step]:
        return [self._ask_snapshot()] if self.request_id else []

    def _begin(self, worker: str, epoch: int) -> list[Step]:
        self.worker, self.epoch, self.seq, self.synced = worker, epoch, 0, False
        self._waiting = {}
        return ["reset", self._ask_snapshot()]

    def _drain(self) -> list[Step]:
        """Apply waiting deltas that continue the stream; a remaining gap requests a replay."""
        steps: list[Step] = []
        for seq in sorted(self._waiting):
            if seq <= self.seq:
                del self._waiting[seq]
            elif seq == self.seq + 1:
                self.seq = seq
                steps.append(self._waiting.pop(seq))
            else:
                steps.append(self._ask_replay())
                break
        return steps

    def _ask_snapshot(self) -> SnapshotRequest:
        self._parts = []
        return SnapshotRequest(self._new_request())

    def _ask_replay(self) -> ReplayRequest:
        return ReplayRequest(self._new_request(), self.epoch, self.seq + 1)

    def _new_request(self) -> int:
        self.request_id, self._next_id = self._next_id, self._next_id + 2
        return self.request_id
