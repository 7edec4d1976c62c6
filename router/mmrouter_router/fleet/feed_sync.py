"""Pure ordering of one sidecar's feed: what to apply, what to ask for, when the index equals the engine's cache.

The follower sees frames in whatever order two sockets deliver them. Deltas before the snapshot wait; a snapshot at
(epoch, seq) absorbs those up to ``seq``; a hole asks for a replay, a replay that is gone asks for a snapshot; a new
epoch or a new worker id empties everything and starts over. It returns :data:`Step` values and does no I/O.
"""

from dataclasses import dataclass, field

from mmrouter_lib.feed import Delta, Heartbeat, ReplayPart, SnapshotPart


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget every rank of this worker."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply one delta."""

    delta: Delta


@dataclass(frozen=True, slots=True)
class Load:
    """Add the keys of one snapshot part."""

    part: SnapshotPart


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Send a ``Snapshot`` request with this id; every answer to an older one is stale."""

    id: int


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Send a ``Replay`` request for this epoch from number ``first`` on."""

    id: int
    epoch: int
    first: int


@dataclass(frozen=True, slots=True)
class Synced:
    """The index now holds what the sidecar held at ``seq``."""

    epoch: int
    seq: int


Step = Reset | Apply | Load | AskSnapshot | AskReplay | Synced

MAX_WAITING = 10_000
"""Deltas kept while a snapshot or replay is under way; beyond it a fresh snapshot is cheaper than the backlog."""


@dataclass
class Follower:
    """State of one worker's feed. ``synced`` is true while the index equals the sidecar's stream without a hole."""

    worker: str = ""
    epoch: int = 0
    seq: int = 0
    synced: bool = False
    _asked: int = 0  # id of the request that is under way, 0 for none
    _next_id: int = 1
    _waiting: dict[int, Delta] = field(default_factory=dict)
    _parts: list[SnapshotPart] = field(default_factory=list)

    def start(self) -> list[Step]:
        """(Re)connect: everything known is stale until a snapshot says otherwise."""
        self.synced = False
        self._waiting.clear()
        return [self._ask_snapshot()]

    def on_heartbeat(self, beat: Heartbeat) -> list[Step]:
        """Note who speaks; a newer ``seq`` than ours shows that the newest delta was lost.

        A sidecar that was silent for too long is asked for a snapshot as soon as it is heard again.
        """
        if (beat.worker, beat.epoch) != (self.worker, self.epoch):
            if beat.epoch < self.epoch:
                return []  # a late frame of an epoch that has ended
            return self._begin(beat.worker, beat.epoch)
        if self._asked:
            return []
        if not self.synced:
            return [self._ask_snapshot()]
        return [self._ask_replay()] if beat.seq > self.seq else []

    def advance(self, delta: Delta) -> bool:
        """Whether the delta simply goes on with the stream, as nearly all do: it is to be applied, and that is all.

        Where it does not, nothing has changed and :meth:`on_delta` knows what to do.
        """
        if self.synced and delta.seq == self.seq + 1 and delta.epoch == self.epoch and not self._asked:
            self.seq = delta.seq
            return True
        return False

    def on_delta(self, delta: Delta) -> list[Step]:
        """Apply in order, keep for later, or ignore as already applied."""
        if delta.epoch < self.epoch:
            return []
        if delta.epoch > self.epoch:
            # The heartbeat that names the new worker id follows; empty now rather than match a dead cache until then.
            steps = self._begin(self.worker, delta.epoch)
            self._waiting[delta.seq] = delta
            return steps
        if delta.seq <= self.seq and self.synced:
            return []
        if self.advance(delta):
            return [Apply(delta)]
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.clear()
            return [self._ask_snapshot()]
        self._waiting[delta.seq] = delta
        if self.synced and not self._asked:
            return [self._ask_replay()]
        return []

    def on_snapshot(self, part: SnapshotPart) -> list[Step]:
        """Collect parts; with the last one, replace everything and go on with the deltas that waited."""
        if part.id != self._asked or part.epoch < self.epoch:
            return []
        self._parts.append(part)
        if not part.last:
            return []
        parts, self._parts, self._asked = self._parts, [], 0
        if any((p.epoch, p.seq) != (part.epoch, part.seq) for p in parts):
            return [self._ask_snapshot()]
        self.worker, self.epoch, self.seq, self.synced = part.worker, part.epoch, part.seq, True
        self._waiting = {seq: delta for seq, delta in self._waiting.items() if delta.epoch == part.epoch}
        steps: list[Step] = [Reset(), *(Load(p) for p in parts if p.keys)]
        steps += self._drain()
        steps.append(Synced(self.epoch, self.seq))
        return steps

    def on_replay(self, part: ReplayPart) -> list[Step]:
        """Apply what the ring still had; ask for a snapshot where it had not enough."""
        if part.id != self._asked:
            return []
        if part.gone:
            self.synced = False
            return [self._ask_snapshot()]
        for delta in part.deltas:
            if delta.epoch == self.epoch and delta.seq > self.seq:
                self._waiting[delta.seq] = delta
        if not part.last:
            return []
        self._asked = 0
        return [*self._drain(), *([] if self._asked else [Synced(self.epoch, self.seq)])]

    def on_refused(self, request_id: int) -> list[Step]:
        """A request that cannot be answered any more (its epoch ended) is replaced by a snapshot."""
        if request_id != self._asked:
            return []
        self.synced = False
        return [self._ask_snapshot()]

    def on_silence(self) -> list[Step]:
        """No answer came in time: ask again, with a new id."""
        return [self._ask_snapshot()] if self._asked else []

    def _begin(self, worker: str, epoch: int) -> list[Step]:
        self.worker, self.epoch, self.seq, self.synced = worker, epoch, 0, False
        self._waiting = {}
        return [Reset(), self._ask_snapshot()]

    def _drain(self) -> list[Step]:
        """Apply waiting deltas that continue the stream; a hole that is left asks for a replay."""
        steps: list[Step] = []
        for seq in sorted(self._waiting):
            if seq <= self.seq:
                del self._waiting[seq]
            elif seq == self.seq + 1:
                self.seq = seq
                steps.append(Apply(self._waiting.pop(seq)))
            else:
                steps.append(self._ask_replay())
                break
        return steps

    def _ask_snapshot(self) -> AskSnapshot:
        self._asked, self._next_id = self._next_id, self._next_id + 1
        self._parts = []
        return AskSnapshot(self._asked)

    def _ask_replay(self) -> AskReplay:
        self._asked, self._next_id = self._next_id, self._next_id + 1
        return AskReplay(self._asked, self.epoch, self.seq + 1)
