"""State of the engine pods: feed, index slots, load and verification of each worker. No I/O."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from blake3 import blake3

from mmrouter_lib import feed
from mmrouter_lib.block_keys import unpack_keys
from mmrouter_lib.cache_layout import DEVICE, LOWER_TIERS, CacheLayout, cache_layout
from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.engines.base.release_order import is_before
from mmrouter_lib.feed import Delta, Heartbeat
from mmrouter_router.fleet.feed_sync import FeedSync, Step
from mmrouter_router.fleet.holder_table import Slot
from mmrouter_router.fleet.index import Index
from mmrouter_router.fleet.rank_load import LoadColumns, RankUsage
from mmrouter_router.sentinels.table import Scope
from mmrouter_router.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from mmrouter_router.fleet.cache_query import CacheQuery

SyncRequest = feed.SnapshotRequest | feed.ReplayRequest
RECENT: Final = 64  # changes that a fleet remembers


@dataclass(frozen=True, slots=True)
class Member:
    """One engine pod as discovery reports it (docs/architecture.md).

    ``ready``: the sidecar has started, or the containers are ready where there is no sidecar. The engine may still load
    weights. ``compatibility``: engines that exchange KV blocks have equal values (docs/children.md); empty: unknown.
    ``admitted``: the operator has opened the pod's readiness gates, or it has none. ``tls``: its HTTP port serves TLS.
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
    tls: bool = False


@dataclass
class Worker:
    """State of one engine pod.

    ``slots`` has the index slot of each rank's primary cache group in the current epoch, ``beside`` those of the other
    groups, by rank and group, ``below`` those of lower tiers, by rank and medium.
    """

    member: Member
    since: float
    sync: FeedSync = field(default_factory=FeedSync)
    heartbeat: Heartbeat | None = None
    heartbeat_at: float = 0.0
    slots: dict[int, Slot] = field(default_factory=dict)
    usage: dict[int, RankUsage] = field(default_factory=dict)
    beside: dict[tuple[int, int], Slot] = field(default_factory=dict)
    below: dict[tuple[int, str], Slot] = field(default_factory=dict)
    lower_media: tuple[str, ...] = ()  # that are indexed
    layout: CacheLayout = field(default_factory=lambda: cache_layout(()))
    delta_event: asyncio.Event = field(default_factory=asyncio.Event)  # set by every delta; waiters clear it
    scope: Scope | None = None  # of SGLang: engines with equal scopes assign equal sentinels
    version: int = 0  # of the fleet at the last change of this worker that placement may see

    @property
    def id(self) -> str:
        """``<pod uid>/<boot id>``; only the uid before the first heartbeat."""
        return self.heartbeat.worker if self.heartbeat else self.member.uid

    @property
    def ranks(self) -> int:
        return self.heartbeat.ranks if self.heartbeat else 1

    def is_older(self, release: tuple[int, ...]) -> bool:
        """Whether the engine is of an older release than this one."""
        return self.heartbeat is not None and is_before(release, self.heartbeat.engine_version)

    @property
    def serving(self) -> bool:
        """Whether the engine was up and not draining at the last heartbeat."""
        beat = self.heartbeat
        return beat is not None and beat.engine_state == "up" and not self.draining

    @property
    def draining(self) -> bool:
        """Whether the worker gets no more requests and stops when its last ones have ended."""
        return self.member.draining or (self.heartbeat is not None and self.heartbeat.draining)

    @property
    def routable(self) -> bool:
        return self.serving and self.sync.synced

    @property
    def canary(self) -> str:
        beat = self.heartbeat
        if beat is None or beat.canary is None or beat.canary.epoch != self.sync.epoch:
            return "Unknown"
        return beat.canary.result

    def is_admitted(self, now: float, timeout: float) -> bool:
        """Whether the gates are open, or were closed for ``timeout`` seconds, as by an operator that is away."""
        return self.member.admitted or now - self.since >= timeout


def prefer_admitted(workers: Iterable[Worker], now: float, timeout: float) -> list[Worker]:
    workers = list(workers)
    return [worker for worker in workers if worker.is_admitted(now, timeout)] or workers


KeyForm = tuple[int, Scope | None, int]
"""Block size; scope of the engines that have these keys, ``None``: all have the same; lookahead of the keys."""


class Target(NamedTuple):
    worker: Worker
    rank: int
    block_size: int

    @property
    def key_form(self) -> KeyForm:
        return self.block_size, self.worker.scope, self.worker.layout.lookahead


class Fleet:
    """All workers and the one index over their caches.

    ``chunk``: tokens of a chunk of the model's chunked local attention, 0 where it has none.
    """

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic, chunk: int = 0) -> None:
        self.index = Index()
        self.loads = LoadColumns()
        self.workers: dict[str, Worker] = {}
        self.version = 0  # increases with every change of the candidates, for caches of derived values
        self._recent: deque[str] = deque(maxlen=RECENT)  # pod uid of each of the last versions, or empty
        self._metrics, self._clock, self._chunk = metrics, clock, chunk
        self._adapters: tuple[int, frozenset[str]] = (-1, frozenset())  # of a version
        self.change_listeners: list[Callable[[], None]] = []  # of membership, sync, verification and engine state
        self.sighting_listeners: list[Callable[[Worker, feed.ImageObservation], None]] = []
        self.work_listeners: list[Callable[[Worker, feed.Work], None]] = []  # of load frames, this router's included

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers.values())

    def key_forms(self) -> set[KeyForm]:
        """Return the forms of the engines that report a block size: prompts have keys for each of them."""
        sizes = [(worker, worker.heartbeat.block_size) for worker in self if worker.heartbeat is not None]
        return {Target(worker, 0, size).key_form for worker, size in sizes if size > 0}

    def context_length(self) -> int:
        """Return the tokens of the smallest context that engines report, 0 while none does."""
        lengths = (worker.heartbeat.context_length for worker in self if worker.heartbeat is not None)
        return min(filter(None, lengths), default=0)

    def adapters(self) -> frozenset[str]:
        """Return the LoRA adapters that any engine has loaded."""
        if self._adapters[0] != self.version:
            beats = (worker.heartbeat for worker in self)
            names = frozenset(name for beat in beats if beat is not None for name in beat.adapters)
            self._adapters = self.version, names
        return self._adapters[1]

    def now(self) -> float:
        """Seconds on the clock of ``since`` and ``heartbeat_at``."""
        return self._clock()

    def lookup(self, keys: Sequence[int], tokens: int, query: "CacheQuery") -> list[int]:
        """Return by slot the blocks of a prompt that its cache would hit, 0 for slots that the query leaves out and for
        ``NOWHERE``. ``keys``: at the query's block size.
        """
        hits = self.index.leading(keys, query.leading)
        if query.rules:
            # The engine computes a prompt's last token anew, so its block cannot be hit.
            for length in (tokens - 1, tokens):
                rules = {slot: rule for slot, rule in query.rules.items() if rule.sees_last == (length == tokens)}
                found = self.index.match_groups(keys[: max(0, length) // query.block_size], rules) if rules else {}
                for slot, blocks in found.items():
                    hits[slot] = blocks
        return hits

    def changed_since(self, version: int) -> set[str] | None:
        """Return the pod uids of the workers that changed after a version; ``None`` if that is too long ago."""
        behind = self.version - version
        return None if behind > len(self._recent) else {*islice(reversed(self._recent), behind)}

    def touch(self, worker: Worker | None) -> None:
        """Note that what placement reads of a worker may have changed."""
        self.version += 1
        self._recent.append("" if worker is None else worker.member.uid)
        if worker is not None:
            worker.version = self.version

    def changed(self, worker: Worker | None = None) -> None:
        """Notify the listeners of a change. ``worker``: the one that changed, if placement depends on the change."""
        self.touch(worker)
        for listener in tuple(self.change_listeners):
            listener()

    def join(self, member: Member) -> Worker:
        worker = self.workers.get(member.uid)
        if worker is None:
            worker = self.workers[member.uid] = Worker(member, self._clock())
            self.changed(worker)
        elif worker.member != member:
            worker.member = member
            self.changed(worker)
        return worker

    def leave(self, uid: str) -> None:
        worker = self.workers.pop(uid, None)
        if worker is not None:
            self._reset(worker)
            for usage in worker.usage.values():
                usage.leave()
            self.changed(worker)

    def usage(self, worker: Worker, rank: int) -> RankUsage:
        usage = worker.usage.get(rank)
        if usage is None:
            usage = worker.usage[rank] = RankUsage(self.loads)
        return usage

    def on_published(self, worker: Worker, frame: feed.Published) -> list[SyncRequest]:
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
            case feed.LoadReport():
                self.usage(worker, frame.rank).queue(frame.waiting, frame.kv_usage)
            case feed.ImageObservation():
                self._metrics.sightings.inc()
                for on_sighting in self.sighting_listeners:
                    on_sighting(worker, frame)
            case feed.Work():
                for on_work in self.work_listeners:
                    on_work(worker, frame)
        return []

    def on_reply(self, worker: Worker, frame: feed.Reply) -> list[SyncRequest]:
        match frame:
            case feed.SnapshotPart():
                return self._carry_out(worker, worker.sync.on_snapshot(frame))
            case feed.ReplayPart():
                return self._carry_out(worker, worker.sync.on_replay(frame))
            case _:
                return self._carry_out(worker, worker.sync.on_refused(frame.id))

    def request_timed_out(self, worker: Worker) -> list[SyncRequest]:
        """Request a snapshot instead of the unanswered replay. Until it arrives, the index may lack removals."""
        self.mark_stale(worker)
        return self._carry_out(worker, worker.sync.on_silence())

    def feed_connected(self, worker: Worker) -> list[SyncRequest]:
        return self._carry_out(worker, worker.sync.start())

    def mark_stale(self, worker: Worker) -> None:
        if worker.sync.synced:
            worker.sync.synced = False
            self._metrics.feed_events.labels("stale").inc()
            self.changed(worker)

    def _heartbeat(self, worker: Worker, beat: Heartbeat) -> list[SyncRequest]:
        before, worker.heartbeat, worker.heartbeat_at = worker.heartbeat, beat, self._clock()
        if before is None or (before.engine_version, before.facts) != (beat.engine_version, beat.facts):
            worker.scope = _scope(beat, worker.member.pool)
        if before is None or before.epoch != beat.epoch:
            worker.since = self._clock()  # the verification timeout restarts: this cache has proved nothing yet
        steps = self._carry_out(worker, worker.sync.on_heartbeat(beat))
        if beat.epoch == worker.sync.epoch:
            steps += self._regroup(worker, beat)
        quiet = ("seq", "shared")
        if (
            before is None
            or any(getattr(before, name) != getattr(beat, name) for name in beat.__struct_fields__ if name not in quiet)
            or _shared_state(before.shared) != _shared_state(beat.shared)
        ):
            self.changed(worker)
        return steps

    def _regroup(self, worker: Worker, beat: Heartbeat) -> list[SyncRequest]:
        """Resync when other cache groups or tiers are to be indexed: the index holds the keys of the previous ones."""
        engine = ADAPTERS.get(beat.engine)
        last = engine is None or engine.drafter_sees_last(beat.engine_version)
        layout = cache_layout(
            beat.groups,
            complete=beat.all_groups,
            drafter=beat.drafter,
            sees_last=last,
            keys_of_full=beat.keys_of_full,
            chunk=self._chunk,
        )
        known = layout.leading and layout.comparable  # what other layouts load from lower tiers is not
        media = tuple([medium for medium in LOWER_TIERS if known and medium in beat.lower_media])
        before = worker.layout.primary, worker.layout.groups, worker.lower_media
        worker.layout, worker.lower_media = layout, media
        if (layout.primary, layout.groups, media) == before:
            return []
        self._retire(worker, tuple(worker.slots))
        if not worker.sync.synced:
            return []  # a snapshot under way is filtered when it arrives
        self._metrics.feed_events.labels("regroup").inc()
        return self._carry_out(worker, worker.sync.start())

    def _carry_out(self, worker: Worker, steps: list[Step]) -> list[SyncRequest]:
        """Apply steps to the index; return those that send a request."""
        requests: list[SyncRequest] = []
        for step in steps:
            match step:
                case "reset":
                    self._reset(worker)
                case Delta():
                    self._apply(worker, step)
                case feed.SnapshotPart():
                    if self._indexed(worker, step.group, step.medium):
                        slot = self._slot(worker, step.rank, step.group, step.medium)
                        self.index.store(slot, unpack_keys(step.keys))
                case "synced":
                    for rank in range(worker.ranks):
                        self._slot(worker, rank, worker.layout.primary)
                    worker.delta_event.set()
                    self._metrics.feed_events.labels("synced").inc()
                    self.changed(worker)
                case feed.SnapshotRequest() | feed.ReplayRequest():
                    self.touch(worker)  # it may be synced no more
                    kind = "AskSnapshot" if isinstance(step, feed.SnapshotRequest) else "AskReplay"
                    self._metrics.feed_events.labels(kind).inc()
                    requests.append(step)
        return requests

    def _apply(self, worker: Worker, delta: Delta) -> None:
        self._metrics.deltas += 1
        worker.delta_event.set()
        if delta.cleared:
            self._retire(worker, [delta.rank])
        if not self._indexed(worker, delta.group, delta.medium):
            return
        slot = self._slot(worker, delta.rank, delta.group, delta.medium)
        if delta.removed:
            self.index.remove(slot, unpack_keys(delta.removed))
        if delta.stored:
            keys = unpack_keys(delta.stored)
            self.index.store(slot, keys)
            usage = worker.usage.get(delta.rank)
            if usage is not None and usage.promised:
                usage.computed(keys)

    def _indexed(self, worker: Worker, group: int, medium: str) -> bool:
        known = medium == DEVICE or medium in worker.lower_media
        reason = "" if known and group in worker.layout.groups else "group" if known else "medium"
        if reason:
            self._metrics.feed_ignored.labels(reason).inc()
        return not reason

    def _slot(self, worker: Worker, rank: int, group: int, medium: str = DEVICE) -> Slot:
        """Return the slot of a group, or of a lower tier. All of a rank begin and end together."""
        primary = worker.layout.primary
        if rank not in worker.slots:
            worker.slots[rank] = self.index.join()
            for other in worker.layout.groups - {primary}:
                worker.beside[rank, other] = self.index.join()
            for lower in worker.lower_media:
                worker.below[rank, lower] = self.index.join()
            self.touch(worker)
        if medium != DEVICE:
            return worker.below[rank, medium]
        return worker.slots[rank] if group == primary else worker.beside[rank, group]

    def _retire(self, worker: Worker, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if (slot := worker.slots.pop(rank, None)) is not None:
                self.index.retire(slot)
                for place in [place for place in worker.beside if place[0] == rank]:
                    self.index.retire(worker.beside.pop(place))
                for tier in [tier for tier in worker.below if tier[0] == rank]:
                    self.index.retire(worker.below.pop(tier))
                self.touch(worker)

    def _reset(self, worker: Worker) -> None:
        self._retire(worker, tuple(worker.slots))
        self.touch(worker)
        for usage in worker.usage.values():
            usage.clear_pending()


def _shared_state(shared: feed.SharedDirectory | None) -> tuple[bool, int] | None:
    """The part of a shared directory's state whose change listeners need, without its fill level."""
    return None if shared is None else (shared.above, shared.limit)


def _scope(beat: Heartbeat, pool: str) -> Scope | None:
    """Engine version with flags, and pool: engines with other flags, as in a rollout, are another scope."""
    engine = ADAPTERS.get(beat.engine)
    if engine is None or not engine.learns_image_identity:
        return None
    flags = blake3(repr(sorted(beat.facts.items())).encode()).hexdigest(8)
    return f"{beat.engine_version}/{flags}", pool
