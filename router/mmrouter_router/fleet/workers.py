"""What the router knows of its workers: feeds, slots in the index, load and standing. State only; no I/O."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from blake3 import blake3

from mmrouter_lib.block_keys import unpack_keys
from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.feed import (
    CacheGroup,
    Delta,
    Heartbeat,
    ImageObservation,
    LoadReport,
    Published,
    ReplayPart,
    Reply,
    SharedDirectory,
    SnapshotPart,
    Work,
    deciding,
)
from mmrouter_router.core.types import Scope
from mmrouter_router.fleet import feed_sync as follow
from mmrouter_router.fleet.index import Index, Slot, mask_of, window_blocks
from mmrouter_router.fleet.rank_load import Loads, Usage
from mmrouter_router.telemetry.metrics import Metrics

INDEXED_MEDIUM = "GPU"
"""Only blocks in the engine's own device memory count as overlap; vLLM says GPU on every device.

See docs/engine-facts/vllm.md#devices.
"""


@dataclass(frozen=True, slots=True)
class Member:
    """One engine pod as discovery reports it (docs/architecture.md).

    ``ready``: what the router asks of it can answer: its sidecar, or the engine where there is none. A sidecar answers
    while its engine still loads weights.
    ``admitted``: the operator has opened its readiness gates, or it has none.
    ``compatibility``: engines that hand KV blocks to each other have equal ones (docs/children.md); empty: not told.
    """

    uid: str
    name: str
    ip: str
    pool: str
    role: str
    node: str = ""
    ready: bool = True
    draining: bool = False
    compatibility: str = ""
    admitted: bool = True


@dataclass
class Worker:
    """Everything about one engine pod. ``slots`` has one index slot per rank of the present epoch."""

    member: Member
    since: float
    follower: follow.Follower = field(default_factory=follow.Follower)
    beat: Heartbeat | None = None
    beat_at: float = 0.0
    slots: dict[int, Slot] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)
    loads: dict[int, LoadReport] = field(default_factory=dict)
    group: CacheGroup = field(default_factory=lambda: deciding(()))  # the one that is in the index
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # set by every delta; whoever waits clears it
    scope: Scope | None = None
    """Engines with equal scopes make the same of an image: release with flags, and pool, for SGLang; ``None`` where all
    do. Worked out once per change, because every decision asks."""

    @property
    def id(self) -> str:
        """``<pod uid>/<boot id>``; only the uid while the sidecar has not spoken."""
        return self.beat.worker if self.beat else self.member.uid

    @property
    def ranks(self) -> int:
        return self.beat.ranks if self.beat else 1

    @property
    def serving(self) -> bool:
        """The engine was up and not draining when the sidecar last spoke."""
        beat = self.beat
        return beat is not None and beat.engine_state == "up" and not beat.draining and not self.member.draining

    @property
    def routable(self) -> bool:
        """The engine is up and the index equals its cache."""
        return self.serving and self.follower.synced

    @property
    def canary(self) -> str:
        """True, False or Unknown, for the present epoch."""
        beat = self.beat
        if beat is None or beat.canary is None or beat.canary.epoch != self.follower.epoch:
            return "Unknown"
        return beat.canary.result


class Target(NamedTuple):
    """Where a request may go."""

    worker: Worker
    rank: int
    block_size: int


class Caches(NamedTuple):
    """What the index has of targets with one block size. ``windows``: blocks before its end that a hit needs there."""

    slots: dict[Slot, int]  # zeros, in the order of the targets
    mask: int  # of them
    windows: dict[Slot, int]
    block_size: int


def caches(targets: Iterable[Target]) -> Caches:
    """Return the caches of targets that have one; good until their fleet changes."""
    slots: list[Slot] = []
    windows: dict[Slot, int] = {}
    size = 0
    for worker, rank, size in targets:
        slot = worker.slots.get(rank)
        if slot is None:
            continue
        if worker.group.window:
            windows[slot] = window_blocks(worker.group.window, size)
        else:
            slots.append(slot)
    return Caches(dict.fromkeys(slots, 0), mask_of(slots), windows, size)


class Fleet:
    """All workers and the one index over their caches."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.index = Index()
        self.loads = Loads()
        self.workers: dict[str, Worker] = {}
        self.version = 0
        """Rises with every change of who may be chosen and how: what was worked out under one is good until the next.
        Not with caches and loads, which every request looks at anew."""
        self._metrics = metrics
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self._watchers: list[Callable[[Worker, ImageObservation], None]] = []
        self._hearers: list[Callable[[Worker, Work], None]] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers.values())

    def now(self) -> float:
        """Seconds on the clock that ``since`` and ``beat_at`` are on."""
        return self._clock()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every change of membership, sync, verification or engine state."""
        self._listeners.append(listener)

    def off_change(self, listener: Callable[[], None]) -> None:
        """Stop calling ``listener``."""
        self._listeners.remove(listener)

    def on_sighting(self, watcher: Callable[[Worker, ImageObservation], None]) -> None:
        """Call ``watcher`` with every sighting."""
        self._watchers.append(watcher)

    def on_work(self, hear: Callable[[Worker, Work], None]) -> None:
        """Call ``hear`` with what any router, this one among them, says that it has under way at a worker."""
        self._hearers.append(hear)

    def overlap(self, keys: Sequence[int], tokens: int, targets: Iterable[Target]) -> dict[Slot, int]:
        """Return slot -> blocks of a prompt of ``tokens`` that its cache would hit, for targets that have one.

        ``keys`` are the prompt's at the targets' one block size.
        """
        return self.lookup(keys, tokens, caches(targets))

    def lookup(self, keys: Sequence[int], tokens: int, asked: Caches) -> dict[Slot, int]:
        """The same for caches that were looked up before."""
        found = self.index.match(keys, asked.slots, asked.mask) if asked.slots else {}
        if asked.windows:
            # A window keeps what a hit can use, and a prompt's last token is computed anew.
            hittable = max(0, tokens - 1) // asked.block_size
            found |= self.index.match_windows(keys[:hittable], asked.windows)
        return found

    def changed(self) -> None:
        """Tell the listeners, and that what was worked out of the fleet is good no more."""
        self.version += 1
        for listener in tuple(self._listeners):
            listener()

    def join(self, member: Member) -> Worker:
        """Add a pod, or update what discovery says of it."""
        worker = self.workers.get(member.uid)
        if worker is None:
            worker = self.workers[member.uid] = Worker(member, self._clock())
            self.changed()
        elif worker.member != member:
            worker.member = member
            self.changed()
        return worker

    def leave(self, uid: str) -> None:
        """Drop a pod and everything that it held."""
        worker = self.workers.pop(uid, None)
        if worker is not None:
            self._reset(worker)
            for usage in worker.usage.values():
                usage.leave()
            self.changed()

    def usage(self, worker: Worker, rank: int) -> Usage:
        """Return what requests occupy on a rank of a worker of this fleet."""
        usage = worker.usage.get(rank)
        if usage is None:
            usage = worker.usage[rank] = Usage(self.loads)
        return usage

    def published(self, worker: Worker, frame: Published) -> list[follow.Step]:
        """Take a frame of a worker's stream; returns the steps that need I/O (questions to the sidecar)."""
        if worker.beat_at:
            worker.beat_at = self._clock()  # whatever comes shows that the sidecar lives
        if type(frame) is Delta and worker.follower.advance(frame):  # nearly every frame is one, and the next
            self._apply(worker, frame)
            return []
        match frame:
            case Delta():
                return self._carry_out(worker, worker.follower.on_delta(frame))
            case Heartbeat():
                return self._heartbeat(worker, frame)
            case LoadReport():
                worker.loads[frame.rank] = frame
                self.usage(worker, frame.rank).queue(frame.waiting)
                return []
            case ImageObservation():
                self._metrics.sightings.inc()
                for watcher in self._watchers:
                    watcher(worker, frame)
                return []
            case Work():
                for hear in self._hearers:
                    hear(worker, frame)
                return []

    def replied(self, worker: Worker, frame: Reply) -> list[follow.Step]:
        """Take an answer that belongs to the stream (snapshot or replay)."""
        match frame:
            case SnapshotPart():
                return self._carry_out(worker, worker.follower.on_snapshot(frame))
            case ReplayPart():
                return self._carry_out(worker, worker.follower.on_replay(frame))
            case _:
                return self._carry_out(worker, worker.follower.on_refused(frame.id))

    def silence(self, worker: Worker) -> list[follow.Step]:
        """A question stayed unanswered."""
        return self._carry_out(worker, worker.follower.on_silence())

    def connect(self, worker: Worker) -> list[follow.Step]:
        """The feed's sockets are (again) open."""
        return self._carry_out(worker, worker.follower.start())

    def lost(self, worker: Worker) -> None:
        """The feed fell silent: what the index says of this worker is not proved any more."""
        if worker.follower.synced:
            worker.follower.synced = False
            self._metrics.feed_events.labels("stale").inc()
            self.changed()

    def _heartbeat(self, worker: Worker, beat: Heartbeat) -> list[follow.Step]:
        before, worker.beat, worker.beat_at = worker.beat, beat, self._clock()
        if before is None or (before.engine_version, before.facts) != (beat.engine_version, beat.facts):
            worker.scope = _scope(beat, worker.member.pool)
        if before is None or before.epoch != beat.epoch:
            worker.since = self._clock()  # verification has its time anew: this cache has proved nothing yet
        steps = self._carry_out(worker, worker.follower.on_heartbeat(beat))
        if beat.epoch == worker.follower.epoch:
            steps += self._regroup(worker, deciding(beat.groups))
        quiet = ("seq", "shared")
        if (
            before is None
            or any(getattr(before, name) != getattr(beat, name) for name in beat.__struct_fields__ if name not in quiet)
            or _told(before.shared) != _told(beat.shared)
        ):
            self.changed()
        return steps

    def _regroup(self, worker: Worker, group: CacheGroup) -> list[follow.Step]:
        """Another group decides what a hit is: what the index holds of the worker is that of the group before."""
        before, worker.group = worker.group, group
        if group.group == before.group or not worker.follower.synced:
            return []  # what is under way is filtered when it comes
        self._metrics.feed_events.labels("regroup").inc()
        return self._carry_out(worker, worker.follower.start())

    def _carry_out(self, worker: Worker, steps: list[follow.Step]) -> list[follow.Step]:
        questions: list[follow.Step] = []
        for step in steps:
            match step:
                case follow.Reset():
                    self._reset(worker)
                case follow.Apply(delta):
                    self._apply(worker, delta)
                case follow.Load(part):
                    if self._indexed(worker, part.group, part.medium):
                        self.index.store(self._slot(worker, part.rank), unpack_keys(part.keys))
                case follow.Synced():
                    for rank in range(worker.ranks):
                        self._slot(worker, rank)
                    worker.moved.set()
                    self._metrics.feed_events.labels("synced").inc()
                    self.changed()
                case follow.AskSnapshot() | follow.AskReplay():
                    self.version += 1  # the index may equal the engine's cache no more
                    self._metrics.feed_events.labels(type(step).__name__).inc()
                    questions.append(step)
        return questions

    def _apply(self, worker: Worker, delta: Delta) -> None:
        self._metrics.deltas += 1
        worker.moved.set()
        if delta.cleared and delta.rank in worker.slots:
            self.index.retire(worker.slots.pop(delta.rank))
            self.version += 1
        if not self._indexed(worker, delta.group, delta.medium):
            return
        slot = worker.slots.get(delta.rank)
        if slot is None:
            slot = self._slot(worker, delta.rank)
        if delta.removed:
            self.index.remove(slot, unpack_keys(delta.removed))
        if delta.stored:
            keys = unpack_keys(delta.stored)
            self.index.store(slot, keys)
            usage = worker.usage.get(delta.rank)
            if usage is not None and usage.promised:
                usage.stored(keys)

    def _indexed(self, worker: Worker, group: int, medium: str) -> bool:
        if medium != INDEXED_MEDIUM:
            self._metrics.feed_ignored.labels("medium").inc()
            return False
        if group != worker.group.group:
            self._metrics.feed_ignored.labels("group").inc()
            return False
        return True

    def _slot(self, worker: Worker, rank: int) -> Slot:
        slot = worker.slots.get(rank)
        if slot is None:
            slot = worker.slots[rank] = self.index.join()
            self.version += 1
        return slot

    def _reset(self, worker: Worker) -> None:
        for slot in worker.slots.values():
            self.index.retire(slot)
        worker.slots.clear()
        self.version += 1
        for usage in worker.usage.values():
            usage.forget()


def _told(shared: SharedDirectory | None) -> tuple[bool, int] | None:
    """What of a node's shared directory is news to anybody: not each byte."""
    return None if shared is None else (shared.above, shared.limit)


def _scope(beat: Heartbeat, pool: str) -> Scope | None:
    """Engine version and pool; two engines of one release with other flags, as in a rollout, are two scopes."""
    engine = ADAPTERS.get(beat.engine)
    if engine is None or not engine.learns_image_identity:
        return None
    flags = blake3(repr(sorted(beat.facts.items())).encode()).hexdigest(8)
    return f"{beat.engine_version}/{flags}", pool
