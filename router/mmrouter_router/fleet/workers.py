"""State of the engine pods: feed, index slots, load and verification of each worker. No I/O."""

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
from mmrouter_router.fleet import feed_sync
from mmrouter_router.fleet.index import Index, Slot, mask_of, window_blocks
from mmrouter_router.fleet.rank_load import LoadColumns, RankUsage
from mmrouter_router.telemetry.metrics import Metrics

INDEXED_MEDIUM = "GPU"
"""Only blocks in the engine's device memory count as overlap; vLLM says GPU on every device.

See docs/engine-facts/vllm.md#devices.
"""


@dataclass(frozen=True, slots=True)
class Member:
    """One engine pod as discovery reports it (docs/architecture.md).

    ``ready``: the sidecar has started, or the containers are ready where there is no sidecar. The engine may still load
    weights. ``compatibility``: engines that exchange KV blocks have equal values (docs/children.md); empty: unknown.
    ``admitted``: the operator has opened the pod's readiness gates, or it has none.
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
    """State of one engine pod. ``slots`` has one index slot per rank of the current epoch."""

    member: Member
    since: float
    sync: feed_sync.FeedSync = field(default_factory=feed_sync.FeedSync)
    heartbeat: Heartbeat | None = None
    heartbeat_at: float = 0.0
    slots: dict[int, Slot] = field(default_factory=dict)
    usage: dict[int, RankUsage] = field(default_factory=dict)
    group: CacheGroup = field(default_factory=lambda: deciding(()))  # the KV cache group in the index
    delta_event: asyncio.Event = field(default_factory=asyncio.Event)  # set by every delta; waiters clear it
    scope: Scope | None = None
    """Engines with equal scopes assign equal sentinels: SGLang's release with flags, and the pool; else ``None``."""

    @property
    def id(self) -> str:
        """``<pod uid>/<boot id>``; only the uid before the first heartbeat."""
        return self.heartbeat.worker if self.heartbeat else self.member.uid

    @property
    def ranks(self) -> int:
        return self.heartbeat.ranks if self.heartbeat else 1

    @property
    def serving(self) -> bool:
        """Whether the engine was up and not draining at the last heartbeat."""
        beat = self.heartbeat
        return beat is not None and beat.engine_state == "up" and not beat.draining and not self.member.draining

    @property
    def routable(self) -> bool:
        """Whether the engine is up and the index equals its cache."""
        return self.serving and self.sync.synced

    @property
    def canary(self) -> str:
        """Canary result of the current epoch: True, False or Unknown."""
        beat = self.heartbeat
        if beat is None or beat.canary is None or beat.canary.epoch != self.sync.epoch:
            return "Unknown"
        return beat.canary.result

    def is_admitted(self, now: float, timeout: float) -> bool:
        """Whether the readiness gates are open (docs/architecture.md), or ``timeout`` seconds have passed without.

        An operator that is away does not keep a new pod out for longer than ``verification.timeoutSeconds``.
        """
        return self.member.admitted or now - self.since >= timeout


def prefer_admitted(workers: Iterable[Worker], now: float, timeout: float) -> list[Worker]:
    """Return the admitted workers; all of them where none is admitted."""
    workers = list(workers)
    return [worker for worker in workers if worker.is_admitted(now, timeout)] or workers


class Target(NamedTuple):
    """A rank that a request can be sent to."""

    worker: Worker
    rank: int
    block_size: int


class CacheQuery(NamedTuple):
    """Index slots of targets with one block size. ``windows``: blocks that a hit needs before its end."""

    slots: dict[Slot, int]  # zeros, in the order of the targets
    mask: int  # of the slots
    windows: dict[Slot, int]
    block_size: int


def cache_query(targets: Iterable[Target]) -> CacheQuery:
    """Build the query for targets; valid until their fleet changes."""
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
    return CacheQuery(dict.fromkeys(slots, 0), mask_of(slots), windows, size)


class Fleet:
    """All workers and the one index over their caches."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.index = Index()
        self.loads = LoadColumns()
        self.workers: dict[str, Worker] = {}
        self.version = 0
        """Increases with every change of the candidates, so that values derived from them can be cached per version.
        Cache contents and loads change without it."""
        self._metrics = metrics
        self._clock = clock
        self.change_listeners: list[Callable[[], None]] = []
        self._on_sighting: list[Callable[[Worker, ImageObservation], None]] = []
        self._on_work: list[Callable[[Worker, Work], None]] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers.values())

    def now(self) -> float:
        """Seconds on the clock of ``since`` and ``heartbeat_at``."""
        return self._clock()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every change of membership, sync, verification or engine state."""
        self.change_listeners.append(listener)

    def off_change(self, listener: Callable[[], None]) -> None:
        """Stop calling ``listener``."""
        self.change_listeners.remove(listener)

    def on_sighting(self, listener: Callable[[Worker, ImageObservation], None]) -> None:
        """Call ``listener`` with every sighting."""
        self._on_sighting.append(listener)

    def on_work(self, listener: Callable[[Worker, Work], None]) -> None:
        """Call ``listener`` with every load frame of any router, this one included."""
        self._on_work.append(listener)

    def lookup(self, keys: Sequence[int], tokens: int, query: CacheQuery) -> dict[Slot, int]:
        """Return slot -> blocks of a prompt of ``tokens`` that its cache would hit, for targets with a slot.

        ``keys`` are the prompt's at the query's block size.
        """
        hits = self.index.match(keys, query.slots, query.mask) if query.slots else {}
        if query.windows:
            # The engine computes a prompt's last token anew, so its block cannot be hit.
            hittable = max(0, tokens - 1) // query.block_size
            hits |= self.index.match_windows(keys[:hittable], query.windows)
        return hits

    def changed(self) -> None:
        """Invalidate values derived from the fleet and call the listeners."""
        self.version += 1
        for listener in tuple(self.change_listeners):
            listener()

    def join(self, member: Member) -> Worker:
        """Add a pod, or update its membership data."""
        worker = self.workers.get(member.uid)
        if worker is None:
            worker = self.workers[member.uid] = Worker(member, self._clock())
            self.changed()
        elif worker.member != member:
            worker.member = member
            self.changed()
        return worker

    def leave(self, uid: str) -> None:
        """Remove a pod with its index slots and loads."""
        worker = self.workers.pop(uid, None)
        if worker is not None:
            self._reset(worker)
            for usage in worker.usage.values():
                usage.leave()
            self.changed()

    def usage(self, worker: Worker, rank: int) -> RankUsage:
        """Return the load of a rank of a worker of this fleet."""
        usage = worker.usage.get(rank)
        if usage is None:
            usage = worker.usage[rank] = RankUsage(self.loads)
        return usage

    def on_published(self, worker: Worker, frame: Published) -> list[feed_sync.Step]:
        """Take a frame of a worker's stream; returns the requests to send to the sidecar."""
        if worker.heartbeat_at:
            worker.heartbeat_at = self._clock()  # any frame shows that the sidecar lives
        if type(frame) is Delta and worker.sync.advance(frame):  # the common case
            self._apply(worker, frame)
            return []
        match frame:
            case Delta():
                return self._carry_out(worker, worker.sync.on_delta(frame))
            case Heartbeat():
                return self._heartbeat(worker, frame)
            case LoadReport():
                self.usage(worker, frame.rank).queue(frame.waiting)
            case ImageObservation():
                self._metrics.sightings.inc()
                for on_sighting in self._on_sighting:
                    on_sighting(worker, frame)
            case Work():
                for on_work in self._on_work:
                    on_work(worker, frame)
        return []

    def on_reply(self, worker: Worker, frame: Reply) -> list[feed_sync.Step]:
        """Take an answer that belongs to the stream (snapshot or replay)."""
        match frame:
            case SnapshotPart():
                return self._carry_out(worker, worker.sync.on_snapshot(frame))
            case ReplayPart():
                return self._carry_out(worker, worker.sync.on_replay(frame))
            case _:
                return self._carry_out(worker, worker.sync.on_refused(frame.id))

    def request_timed_out(self, worker: Worker) -> list[feed_sync.Step]:
        """Repeat a request that stayed unanswered."""
        return self._carry_out(worker, worker.sync.on_silence())

    def feed_connected(self, worker: Worker) -> list[feed_sync.Step]:
        """Start to sync after the feed's sockets were opened."""
        return self._carry_out(worker, worker.sync.start())

    def mark_stale(self, worker: Worker) -> None:
        """Stop trusting the worker's index content after the feed fell silent."""
        if worker.sync.synced:
            worker.sync.synced = False
            self._metrics.feed_events.labels("stale").inc()
            self.changed()

    def _heartbeat(self, worker: Worker, beat: Heartbeat) -> list[feed_sync.Step]:
        before, worker.heartbeat, worker.heartbeat_at = worker.heartbeat, beat, self._clock()
        if before is None or (before.engine_version, before.facts) != (beat.engine_version, beat.facts):
            worker.scope = _scope(beat, worker.member.pool)
        if before is None or before.epoch != beat.epoch:
            worker.since = self._clock()  # the verification timeout restarts: this cache has proved nothing yet
        steps = self._carry_out(worker, worker.sync.on_heartbeat(beat))
        if beat.epoch == worker.sync.epoch:
            steps += self._regroup(worker, deciding(beat.groups))
        quiet = ("seq", "shared")
        if (
            before is None
            or any(getattr(before, name) != getattr(beat, name) for name in beat.__struct_fields__ if name not in quiet)
            or _shared_state(before.shared) != _shared_state(beat.shared)
        ):
            self.changed()
        return steps

    def _regroup(self, worker: Worker, group: CacheGroup) -> list[feed_sync.Step]:
        """Resync when another cache group decides what a hit is: the index holds the keys of the previous one."""
        before, worker.group = worker.group, group
        if group.group == before.group or not worker.sync.synced:
            return []  # a snapshot under way is filtered when it arrives
        self._metrics.feed_events.labels("regroup").inc()
        return self._carry_out(worker, worker.sync.start())

    def _carry_out(self, worker: Worker, steps: list[feed_sync.Step]) -> list[feed_sync.Step]:
        """Apply steps to the index; return those that send a request."""
        requests: list[feed_sync.Step] = []
        for step in steps:
            match step:
                case feed_sync.ResetWorker():
                    self._reset(worker)
                case feed_sync.ApplyDelta(delta):
                    self._apply(worker, delta)
                case feed_sync.LoadPart(part):
                    if self._indexed(worker, part.group, part.medium):
                        self.index.store(self._slot(worker, part.rank), unpack_keys(part.keys))
                case feed_sync.Synced():
                    for rank in range(worker.ranks):
                        self._slot(worker, rank)
                    worker.delta_event.set()
                    self._metrics.feed_events.labels("synced").inc()
                    self.changed()
                case feed_sync.AskSnapshot() | feed_sync.AskReplay():
                    self.version += 1  # the worker may be synced no more
                    self._metrics.feed_events.labels(type(step).__name__).inc()
                    requests.append(step)
        return requests

    def _apply(self, worker: Worker, delta: Delta) -> None:
        self._metrics.deltas += 1
        worker.delta_event.set()
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
            usage.clear_pending()


def _shared_state(shared: SharedDirectory | None) -> tuple[bool, int] | None:
    """The part of a shared directory's state whose change listeners need, without its fill level."""
    return None if shared is None else (shared.above, shared.limit)


def _scope(beat: Heartbeat, pool: str) -> Scope | None:
    """Engine version with flags, and pool: engines with other flags, as in a rollout, are another scope."""
    engine = ADAPTERS.get(beat.engine)
    if engine is None or not engine.learns_image_identity:
        return None
    flags = blake3(repr(sorted(beat.facts.items())).encode()).hexdigest(8)
    return f"{beat.engine_version}/{flags}", pool
