"""The heart of the sidecar: engine batches in, feed frames out, questions answered. No sockets.

Everything happens in one thread, so a snapshot is a cut between two deltas by construction. Batches are applied to the
ledger at once; :meth:`Relay.flush` writes what changed to the journal and only then publishes it, so that after a kill
the journal holds at least what any router has seen.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator

import msgspec

from mmrouter_lib import feed
from mmrouter_lib.block_keys import pack_keys
from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.engines.base.events import Batch, EventError
from mmrouter_sidecar.blocks.journal import Epoch, Flush, Journal, Record, Verdict
from mmrouter_sidecar.blocks.ledger import Change, Ledger, Op
from mmrouter_sidecar.engine.event_order import SAME_ENGINE
from mmrouter_sidecar.feed.canary_leases import Canaries
from mmrouter_sidecar.feed.history import DeltaRing, RawRing
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Settings, SettingsError

log = logging.getLogger("mmrouter.sidecar")

SNAPSHOT_PART_KEYS = 65_536
SIGHTINGS_PART = 4_096
DISCONNECTED = "disconnected"
"""Reason of an epoch that begins because the engine's connection ended."""

Decoder = Callable[[bytes], Batch]


class EngineFacts(msgspec.Struct, frozen=True):
    """What is known of the engine beside its events."""

    state: str = "starting"
    version: str = ""
    block_size: int = 0
    draining: bool = False
    digests: dict[str, str] = {}
    revision: str = ""
    cut_off: bool = False  # its publisher went away and has not come back
    identity: dict[str, str] = {}  # what media identity depends on beside the model


class Relay:
    """One sidecar's state. ``publish`` gets every frame for the PUB socket, in order."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        publish: Callable[[feed.Published], None],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._metrics, self._publish = settings, metrics, publish
        self._clock, self._monotonic = clock, monotonic
        if settings.engine not in ADAPTERS:
            raise SettingsError(
                f"engine.type: events of {settings.engine!r} cannot be read, only {', '.join(ADAPTERS)}"
            )
        self._decode = ADAPTERS[settings.engine].decode_batch
        self.ledger = Ledger(settings.seed)
        self.canaries = Canaries(0)
        self.facts = EngineFacts(revision=settings.revision)
        self.shared: feed.SharedDirectory | None = None
        """How full the node's shared directory is; the next heartbeat tells it."""
        self.boot, self.epoch, self.seq = "", 0, 0
        self.proofs: dict[int, tuple[int, int]] = {}
        """Rank -> (engine number, digest) of the last batch applied."""
        self._deltas, self._raw = DeltaRing(settings.buffer_events), RawRing(settings.buffer_events)
        self.batches = 0
        self.sent = 0.0
        """Batches applied by this process, and the engine's time of the last one."""
        self._unsent: list[tuple[int, int, bytes]] = []
        self._moved = False  # batches were applied since the last flush
        self._told: tuple[feed.CacheGroup, ...] = ()  # groups in the last heartbeat
        self._unreadable = False  # the last batch was; the log has it
        self._snapshot: list[feed.SnapshotPart] | None = None  # of the present (epoch, seq)
        self._journal: Journal | None = self._open()
        self._recover()

    # -- engine side ---------------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        """Whether :meth:`flush` has anything to do."""
        return self._moved or self.ledger.dirty

    def batch(self, rank: int, seq: int, payload: bytes, digest: int) -> None:
        """Apply the next batch of a rank. One that cannot be read empties the rank: it may have held removals."""
        try:
            batch = self._decode(payload)
        except EventError as error:
            if not self._unreadable:
                log.error("rank %d: batch %d cannot be read, what the rank holds is forgotten: %s", rank, seq, error)
            self._unreadable = True
            self.ledger.counts["undecodable"] += 1
            self.ledger.clear(rank)
        else:
            self._unreadable = False
            self.ledger.apply(batch, rank)
            self.sent = batch.sent
        self.batches += 1
        self.proofs[rank] = (seq, digest)
        self._unsent.append((rank, seq, payload))
        self._moved = True

    def lost(self, rank: int, reason: str) -> bool:
        """Part of a rank's stream is lost: a new epoch begins. Returns whether it is another engine's stream."""
        self._metrics.lost.labels(reason).inc()
        if reason not in SAME_ENGINE:
            self.engine_ended(reason)
            return True
        self.flush()
        self.ledger.clear(rank)
        self.proofs.pop(rank, None)
        log.warning("rank %d: history is lost (%s), what it held is forgotten", rank, reason)
        self._begin(self.boot, fresh=False, reason=reason)
        return False

    def engine_ended(self, reason: str) -> None:
        """The engine is gone or was replaced: its cache with it. A new boot id, a new epoch, honestly empty."""
        self.ledger.reset()
        self.proofs.clear()
        self._unsent.clear()
        self._moved = False
        facts = msgspec.structs.replace(self.facts, version="", block_size=0, identity={})
        if reason == DISCONNECTED:
            facts = msgspec.structs.replace(facts, state="down", cut_off=True)
        self.facts = facts
        self._begin(secrets.token_hex(4), fresh=True, reason=reason)

    def connected(self) -> None:
        """The engine's publisher is (again) there."""
        self.learned(cut_off=False, state="starting" if self.facts.state == "down" else self.facts.state)

    def learned(self, **facts: object) -> None:
        """Take news of the engine; a change is told at once."""
        new = msgspec.structs.replace(self.facts, **facts)
        if new != self.facts:
            if new.state != self.facts.state:
                log.info("engine is %s (was %s)", new.state, self.facts.state)
            self.facts = new
            self.beat()

    # -- feed side -----------------------------------------------------------------------------------------------

    @property
    def worker(self) -> str:
        return f"{self._settings.pod_uid}/{self.boot}"

    def beat(self) -> None:
        """Publish a heartbeat."""
        facts = self.facts
        state, self._told = facts.state, self.ledger.groups
        assert state in ("starting", "up", "down")
        self._publish(
            feed.Heartbeat(
                worker=self.worker,
                epoch=self.epoch,
                seq=self.seq,
                engine=self._settings.engine,
                engine_state=state,  # type: ignore[arg-type]
                engine_version=facts.version,
                block_size=self.ledger.block_size or facts.block_size,
                model=self._settings.model,
                revision=facts.revision,
                digests=facts.digests,
                ranks=self._settings.ranks,
                draining=facts.draining,
                canary=self.canaries.result,
                groups=self.ledger.groups,
                facts=facts.identity,
                shared=self.shared,
            )
        )

    def load(self, rank: int, running: float, waiting: float, kv_usage: float) -> None:
        """Publish one rank's load."""
        self._publish(feed.LoadReport(rank, running, waiting, kv_usage))

    def flush(self) -> None:
        """Number, journal and publish everything that changed since the last flush."""
        if not self.dirty:
            return
        if self.ledger.groups != self._told:
            self.beat()  # a router must know the groups before it can tell which deltas count
        taken = self.ledger.take()
        deltas = [self._delta(change, number) for number, change in enumerate(taken.changes, self.seq + 1)]
        self.seq += len(deltas)
        if self._moved or taken.ops:
            learned = [sighting for sighting in taken.sightings if sighting.sentinels]
            self._write(Flush(self.seq, dict(self.proofs), taken.ops, learned))
        self._moved = False
        if deltas:
            self._snapshot = None
        for delta in deltas:
            self._deltas.append(delta)
            self._publish(delta)
        if self._unsent:
            self._metrics.lag.set(max(0.0, self._clock() - self.sent))
        for rank, engine_seq, payload in self._unsent:
            self._raw.append(feed.RawBatch(self.seq, rank, engine_seq, payload))
        self._unsent.clear()
        for sighting in taken.sightings:
            self._publish(sighting)
        self._metrics.deltas.inc(len(deltas))

    def answer(self, request: feed.Request) -> Iterator[feed.Reply]:
        """Answer one question; the parts are to be sent in order."""
        match request:
            case feed.SnapshotRequest(number):
                yield from self._snapshot_parts(number)
            case feed.ReplayRequest(number, epoch, first):
                if epoch == self.epoch:
                    yield from self._deltas.replay(number, first)
                else:
                    yield self._old_epoch(number, epoch)
            case feed.DetailRequest(number, epoch, first, end):
                if epoch == self.epoch:
                    self.flush()
                    yield from self._raw.detail(number, first, end)
                else:
                    yield self._old_epoch(number, epoch)
            case feed.ObservationsRequest(number):
                self.flush()
                yield from self._sightings(number)
            case feed.CanaryClaim():
                yield self.canaries.claim(request, self._monotonic())
            case feed.CanaryResult():
                reply = self.canaries.report(request, self._monotonic())
                if isinstance(reply, feed.Accepted):
                    self._verdict(request.canary)
                yield reply
            case feed.Work():  # for the other routers, who cannot see it; it has no answer
                self._publish(request)

    def close(self) -> None:
        """Publish and journal what is left; nothing may be called afterwards."""
        self.flush()
        if self._journal is not None:
            self._journal.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _delta(self, change: Change, seq: int) -> feed.Delta:
        rank, group, medium = change.place
        return feed.Delta(
            epoch=self.epoch,
            seq=seq,
            sent=self._clock(),
            rank=rank,
            group=group,
            medium=medium,
            stored=pack_keys(change.stored),
            removed=pack_keys(change.removed),
            cleared=change.cleared,
        )

    def _old_epoch(self, request_id: int, epoch: int) -> feed.Refused:
        return feed.Refused(request_id, f"epoch {epoch} is not the present one, {self.epoch}")

    def _sightings(self, request_id: int) -> Iterator[feed.ObservationsPart]:
        held = self.ledger.sightings.remembered
        for start in range(0, max(1, len(held)), SIGHTINGS_PART):
            end = start + SIGHTINGS_PART
            yield feed.ObservationsPart(request_id, held[start:end], last=end >= len(held))

    def _snapshot_parts(self, request_id: int) -> Iterator[feed.SnapshotPart]:
        self.flush()
        if self._snapshot is None:
            # Many routers may ask at once after a restart of theirs; all get the same cut.
            self._snapshot = list(self._cut())
        for part in self._snapshot:
            yield msgspec.structs.replace(part, id=request_id)

    def _cut(self) -> Iterator[feed.SnapshotPart]:
        held = [(place, pack_keys(cache.keys())) for place, cache in self.ledger.caches.items() if cache.blocks]
        pieces = [
            (place, keys[start : start + 8 * SNAPSHOT_PART_KEYS])
            for place, keys in held
            for start in range(0, len(keys), 8 * SNAPSHOT_PART_KEYS)
        ]
        for number, (place, keys) in enumerate(pieces, 1):
            yield feed.SnapshotPart(0, self.worker, self.epoch, self.seq, *place, keys, last=number == len(pieces))
        if not pieces:
            yield feed.SnapshotPart(0, self.worker, self.epoch, self.seq, 0, 0, "GPU", b"", last=True)

    def _verdict(self, canary: feed.CanaryReport) -> None:
        difference = f": {canary.cause}, {canary.message}" if canary.cause else ""
        log.info("canary of epoch %d: %s%s", canary.epoch, canary.result, difference)
        self._write(Verdict(canary))
        self.beat()

    def _begin(self, boot: str, *, fresh: bool, reason: str) -> None:
        """Start an epoch. Numbers follow the clock, so that they rise even where a journal was lost."""
        self.boot = boot
        self.epoch = max(self.epoch + 1, int(self._clock() * 1000))
        self.seq = 0
        taken = self.ledger.take()  # the epoch's beginning is a snapshot, not a delta
        self._deltas.clear(0)
        self._raw.clear(0)
        self._snapshot = None
        self.canaries.begin(self.epoch)
        log.info("epoch %d begins for %s: %s", self.epoch, self.worker, reason)
        self._metrics.epochs.labels(reason).inc()
        self._write(Epoch(boot, self.epoch, fresh, dict(self.proofs), taken.ops))
        self.beat()

    def _open(self) -> Journal | None:
        try:
            return Journal(self._settings.state_dir, self._settings.fingerprint)
        except OSError as error:
            self._journal_failed(error)
            return None

    def _recover(self) -> None:
        if self._journal is not None:
            for record in self._journal.recover():
                match record:
                    case Epoch(boot, epoch, fresh, last, ops):
                        self.boot, self.epoch, self.seq = boot, epoch, 0
                        self.canaries.begin(epoch)
                        if fresh:
                            self.ledger.reset()
                        self._redo(last, ops)
                    case Flush(seq, last, ops, sightings):
                        self.seq = seq
                        self.ledger.sightings.recall(sightings)
                        self._redo(last, ops)
                    case Verdict(canary):
                        self.canaries.result = canary
            self._metrics.journal_bytes.set(self._journal.size)
            if self._journal.torn_bytes:
                log.warning("journal: a torn record of %d bytes was cut off", self._journal.torn_bytes)
        if not self.boot:
            self._begin(secrets.token_hex(4), fresh=True, reason="start")
            return
        self._deltas.clear(self.seq)
        self._raw.clear(self.seq)
        log.info("goes on with %s: epoch %d, seq %d, %d blocks", self.worker, self.epoch, self.seq, self.ledger.held)

    def _redo(self, last: dict[int, tuple[int, int]], ops: list[Op]) -> None:
        self.proofs = dict(last)
        for op in ops:
            self.ledger.redo(op)

    def _write(self, record: Record) -> None:
        journal = self._journal
        if journal is None:
            return
        try:
            journal.append(record)
            if journal.bloated:
                self._compact(journal)
        except OSError as error:
            self._journal = None
            self._journal_failed(error)
            try:
                journal.discard()
            except OSError as worse:
                log.error("the journal cannot be removed either: %s", worse)
            return
        self._metrics.journal_bytes.set(journal.size)

    def _compact(self, journal: Journal) -> None:
        started = self._monotonic()
        records: list[Record] = [Epoch(self.boot, self.epoch, True, {}, [])]
        if self.canaries.result is not None:
            records.append(Verdict(self.canaries.result))
        learned = [sighting for sighting in self.ledger.sightings.remembered if sighting.sentinels]
        records.append(Flush(self.seq, dict(self.proofs), self.ledger.dump(), learned))
        journal.compact(records)
        log.info("journal rewritten: %d bytes in %.0f ms", journal.size, (self._monotonic() - started) * 1000)

    def _journal_failed(self, error: OSError) -> None:
        log.error("no journal, a restart will begin an empty epoch: %s", error)
        self._metrics.journal_errors.inc()
        self._metrics.journal_bytes.set(0)
