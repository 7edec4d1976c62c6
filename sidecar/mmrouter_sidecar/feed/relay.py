"""Relay engine event batches to routers: update the ledger, journal and publish deltas, answer routers' requests.

There are no sockets here. Everything runs in one thread, so a snapshot is always a cut between two deltas. Batches are
applied to the ledger at once; :meth:`EventRelay.flush` writes the changes to the journal before it publishes them, so
after a kill the journal contains at least what any router has seen.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from mmrouter_lib import feed
from mmrouter_lib.block_keys import pack_keys
from mmrouter_lib.cache_layout import CacheGroup
from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.engines.base.events import EventError
from mmrouter_lib.settings_errors import SettingsError
from mmrouter_sidecar.blocks.journal import CanaryOutcome, Epoch, Flush, Journal, Record
from mmrouter_sidecar.blocks.ledger import Ledger
from mmrouter_sidecar.blocks.ledger_ops import LedgerOp
from mmrouter_sidecar.feed.embedding_directory import EmbeddingDirectory
from mmrouter_sidecar.feed.epoch_state import EpochCanary, History
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Settings

log = logging.getLogger("mmrouter.sidecar")

SNAPSHOT_PART_KEYS = 65_536
OBSERVATIONS_PART = 4_096
DISCONNECTED = "disconnected"  # reason of an epoch that begins because the engine's event connection ended
SAME_ENGINE = frozenset({"history", "backlog", "unanswered"})
"""Reasons of a loss of history after which the engine is still the same instance."""


class EngineFacts(msgspec.Struct, frozen=True):
    """Properties of the engine that its events do not contain."""

    state: Literal["starting", "up", "down"] = "starting"
    version: str = ""
    block_size: int = 0
    draining: bool = False
    digests: dict[str, str] = {}
    revision: str = ""
    cut_off: bool = False  # its publisher has disconnected
    identity: dict[str, str] = {}  # settings that media identities depend on
    device: str = ""  # as the engine reports it
    devices: int = 0
    routes: tuple[str, ...] = ()  # passed routes that it serves
    context_length: int = 0
    adapters: tuple[str, ...] = ()  # LoRA adapters that it has loaded


class EventRelay:
    """The feed's state. ``publish`` gets every frame for the PUB socket, in order."""

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
        self.canary = EpochCanary(0)
        self.embeddings = EmbeddingDirectory(settings.directory_bytes)
        self.facts = EngineFacts(revision=settings.revision)
        self.shared: feed.SharedDirectory | None = None  # usage of the node's shared directory, for the next heartbeat
        self.feed_keys = settings.curve.fingerprints
        self.boot, self.epoch, self.seq = "", 0, 0
        self.proofs: dict[int, tuple[int, int]] = {}  # rank -> (engine number, digest) of the last batch applied
        self._deltas = History[feed.Delta](settings.buffer_events)
        self._raw = History[feed.RawBatch](settings.buffer_events)
        self.batches = 0
        self.sent = 0.0  # the engine's time of the last batch
        self._unpublished: list[tuple[int, int, bytes]] = []
        self._applied = False  # batches were applied since the last flush
        self._announced: tuple[tuple[CacheGroup, ...], tuple[str, ...]] = (), ()  # groups and media in a heartbeat
        self._unreadable = False  # whether the last batch was; only the first in a row is logged
        self._snapshot: list[feed.SnapshotPart] | None = None  # of the present (epoch, seq)
        self._unconfirmed: set[int] = set()  # ranks whose resumed state the engine has not confirmed yet
        self._journal: Journal | None = None
        try:
            self._journal = Journal(settings.state_dir, settings.fingerprint)
        except OSError as error:
            self._journal_failed(error)
        self._recover()

    @property
    def dirty(self) -> bool:
        return self._applied or self.ledger.dirty

    def batch(self, rank: int, seq: int, payload: bytes, digest: int) -> None:
        """Apply the next batch of a rank. An unreadable one clears the rank, as it may have contained removals."""
        try:
            batch = self._decode(payload)
        except EventError as error:
            if not self._unreadable:
                log.error("rank %d: batch %d cannot be read, the rank is cleared: %s", rank, seq, error)
            self._unreadable = True
            self.ledger.counts["undecodable"] += 1
            self.ledger.clear(rank)
        else:
            self._unreadable = False
            self.ledger.apply(batch, rank)
            self.sent = batch.sent
        self.batches += 1
        self.proofs[rank] = (seq, digest)
        self._unpublished.append((rank, seq, payload))
        self._applied = True

    def lost(self, rank: int, reason: str) -> bool:
        """Begin a new epoch after a loss of history. Returns whether the stream is that of another engine instance."""
        self._metrics.lost.labels(reason).inc()
        if reason not in SAME_ENGINE:
            self.engine_ended(reason)
            return True
        self.flush()
        self.ledger.clear(rank)
        self.proofs.pop(rank, None)
        log.warning("rank %d: history is lost (%s), the rank is cleared", rank, reason)
        self._begin(self.boot, fresh=False, reason=reason)
        return False

    def engine_ended(self, reason: str) -> None:
        """The engine ended, and its cache with it: begin an empty epoch with a new boot id."""
        self.ledger.reset()
        self.proofs.clear()
        self._unconfirmed.clear()
        self._unpublished.clear()
        self._applied = False
        kept = {name: getattr(self.facts, name) for name in ("state", "draining", "digests", "revision", "cut_off")}
        self.facts = EngineFacts(**kept)
        if reason == DISCONNECTED:
            self.facts = msgspec.structs.replace(self.facts, state="down", cut_off=True)
        self._begin(secrets.token_hex(4), fresh=True, reason=reason)

    def connected(self) -> None:
        self.update_facts(cut_off=False, state="starting" if self.facts.state == "down" else self.facts.state)

    def update_facts(self, **facts: object) -> None:
        """Update the facts; publish a heartbeat if they changed."""
        new = msgspec.structs.replace(self.facts, **facts)
        if new != self.facts:
            if new.state != self.facts.state:
                log.info("engine is %s (was %s)", new.state, self.facts.state)
            self.facts = new
            self.beat()

    def confirm(self, rank: int) -> None:
        """Record that a replay confirmed a rank's resumed state; the engine is up once all ranks are confirmed."""
        if rank in self._unconfirmed:
            self.flush()
            self._unconfirmed.remove(rank)
            self.beat()

    @property
    def engine_state(self) -> Literal["starting", "up", "down"]:
        """The engine's state for routers, which send requests to ``up`` only.

        An engine with a resumed state that is not confirmed counts as starting, because its cache may have changed.
        """
        return "starting" if self._unconfirmed and self.facts.state == "up" else self.facts.state

    @property
    def worker(self) -> str:
        return f"{self._settings.pod_uid}/{self.boot}"

    def beat(self) -> None:
        facts, self._announced = self.facts, (self.ledger.groups, self.ledger.lower_media)
        self._publish(
            feed.Heartbeat(
                worker=self.worker,
                epoch=self.epoch,
                seq=self.seq,
                engine=self._settings.engine,
                engine_state=self.engine_state,
                engine_version=facts.version,
                block_size=self.ledger.block_size or facts.block_size,
                model=self._settings.model,
                revision=facts.revision,
                digests=facts.digests,
                ranks=self._settings.ranks,
                draining=facts.draining,
                canary=self.canary.result,
                groups=self.ledger.groups,
                facts=facts.identity,
                shared=self.shared,
                keys=self.feed_keys,
                device=facts.device,
                devices=facts.devices,
                requested_device=self._settings.device,
                all_groups=True,
                keys_of_full=True,
                has_aside=self.ledger.has_aside,
                routes=facts.routes,
                context_length=facts.context_length,
                drafter=self._settings.drafter,
                adapters=facts.adapters,
                lower_media=self.ledger.lower_media,
            )
        )

    def load(self, rank: int, running: float, waiting: float, kv_usage: float) -> None:
        self._publish(feed.LoadReport(rank, running, waiting, kv_usage))

    def flush(self) -> None:
        """Number, journal and publish everything that changed since the last flush."""
        if not self.dirty:
            return
        if (self.ledger.groups, self.ledger.lower_media) != self._announced:
            self.beat()  # routers need them before the deltas
        taken = self.ledger.take()
        deltas = []
        for seq, (place, stored, removed, cleared) in enumerate(taken.changes, self.seq + 1):
            packed = pack_keys(stored), pack_keys(removed)
            deltas.append(feed.Delta(self.epoch, seq, self._clock(), *place, *packed, cleared))
        self.seq += len(deltas)
        if self._applied or taken.ops:
            new = [sighting for sighting in taken.sightings if sighting.sentinels]
            self._write(Flush(self.seq, dict(self.proofs), taken.ops, new))
        self._applied = False
        if deltas:
            self._snapshot = None
        for delta in deltas:
            self._deltas.append(delta)
            self._publish(delta)
        if self._unpublished:
            self._metrics.lag.set(max(0.0, self._clock() - self.sent))
        for rank, engine_seq, payload in self._unpublished:
            self._raw.append(feed.RawBatch(self.seq, rank, engine_seq, payload))
        self._unpublished.clear()
        for sighting in taken.sightings:
            self._publish(sighting)
        self._metrics.deltas.inc(len(deltas))

    def answer(self, request: feed.Request) -> Iterator[feed.Reply]:
        """Yield the parts of the answer to a request, in order."""
        match request:
            case feed.SnapshotRequest(number):
                self.flush()
                if self._snapshot is None:
                    # Many routers may request it at the same time: all get the same snapshot.
                    self._snapshot = list(self._build_snapshot())
                for part in self._snapshot:
                    yield msgspec.structs.replace(part, id=number)
            case feed.ReplayRequest(number, epoch) | feed.DetailRequest(number, epoch) if epoch != self.epoch:
                yield feed.Refused(number, f"epoch {epoch} is not the present one, {self.epoch}")
            case feed.ReplayRequest(number, _, first) if first <= self._deltas.floor:
                yield feed.ReplayPart(number, (), last=True, gone=True)
            case feed.ReplayRequest(number, _, first):
                for deltas, last in self._deltas.parts(first):
                    yield feed.ReplayPart(number, deltas, last)
            case feed.DetailRequest(number, _, first, end):
                self.flush()
                gone = first <= self._raw.floor
                for batches, last in self._raw.parts(first, end):
                    yield feed.DetailPart(number, batches, last, gone)
            case feed.ObservationsRequest(number):
                self.flush()
                held = self.ledger.observations.remembered
                for start in range(0, max(1, len(held)), OBSERVATIONS_PART):
                    end = start + OBSERVATIONS_PART
                    yield feed.ObservationsPart(number, held[start:end], last=end >= len(held))
            case feed.CanaryClaim():
                yield self.canary.claim(request, self._monotonic())
            case feed.CanaryResult():
                reply, canary = self.canary.report(request, self._monotonic()), request.canary
                if isinstance(reply, feed.Accepted):
                    difference = f": {canary.cause}, {canary.message}" if canary.cause else ""
                    log.info("canary of epoch %d: %s%s", canary.epoch, canary.result, difference)
                    self.flush()  # else a rewritten journal has what waits, and the next flush appends it again
                    self._write(CanaryOutcome(canary))
                    self.beat()
                yield reply
            case feed.EmbeddingClaim():
                yield self.embeddings.claim(request, self._monotonic())
            case feed.EmbeddingReport():
                yield self.embeddings.report(request)
            case feed.Work():  # forwarded to the other routers; it has no answer
                self._publish(request)

    def close(self) -> None:
        """Flush, and close the journal. The relay cannot be used afterwards."""
        self.flush()
        if self._journal is not None:
            self._journal.close()

    def _build_snapshot(self) -> Iterator[feed.SnapshotPart]:
        held, size = self.ledger.tables.items(), 8 * SNAPSHOT_PART_KEYS
        packed = [(place, pack_keys(table.keys())) for place, table in held if table.blocks]
        pieces = [(place, keys[at : at + size]) for place, keys in packed for at in range(0, len(keys), size)]
        for number, (place, keys) in enumerate(pieces, 1):
            yield feed.SnapshotPart(0, self.worker, self.epoch, self.seq, *place, keys, last=number == len(pieces))
        if not pieces:
            yield feed.SnapshotPart(0, self.worker, self.epoch, self.seq, 0, 0, "GPU", b"", last=True)

    def _begin(self, boot: str, *, fresh: bool, reason: str) -> None:
        """Start an epoch. Its number follows the clock, so that it rises even without a journal."""
        self.boot = boot
        self.epoch = max(self.epoch + 1, int(self._clock() * 1000))
        self.seq = 0
        taken = self.ledger.take()  # an epoch begins with a snapshot, not with a delta
        self._deltas.clear(0)
        self._raw.clear(0)
        self._snapshot = None
        self.canary = EpochCanary(self.epoch)
        log.info("epoch %d begins for %s: %s", self.epoch, self.worker, reason)
        self._metrics.epochs.labels(reason).inc()
        self._write(Epoch(boot, self.epoch, fresh, dict(self.proofs), taken.ops))
        self.beat()

    def _recover(self) -> None:
        if self._journal is not None:
            for record in self._journal.recover():
                match record:
                    case Epoch(boot, epoch, fresh, last, ops):
                        self.boot, self.epoch, self.seq = boot, epoch, 0
                        self.canary = EpochCanary(epoch)
                        if fresh:
                            self.ledger.reset()
                        self._redo(last, ops)
                    case Flush(seq, last, ops, sightings):
                        self.seq = seq
                        self.ledger.observations.recall(sightings)
                        self._redo(last, ops)
                    case CanaryOutcome(canary):
                        self.canary.result = canary
            self._metrics.journal_bytes.set(self._journal.size)
            if self._journal.torn_bytes:
                log.warning("journal: a torn record of %d bytes was cut off", self._journal.torn_bytes)
        if not self.boot:
            self._begin(secrets.token_hex(4), fresh=True, reason="start")
            return
        self._unconfirmed = set(self.proofs)
        self._deltas.clear(self.seq)
        self._raw.clear(self.seq)
        log.info("resumed %s: epoch %d, seq %d, %d blocks", self.worker, self.epoch, self.seq, self.ledger.held)

    def _redo(self, last: dict[int, tuple[int, int]], ops: list[LedgerOp]) -> None:
        self.proofs = dict(last)
        for op in ops:
            self.ledger.redo(op)

    def _write(self, record: Record) -> None:
        if (journal := self._journal) is None:
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
            except OSError as discard_error:
                log.error("the journal cannot be removed: %s", discard_error)
        else:
            self._metrics.journal_bytes.set(journal.size)

    def _compact(self, journal: Journal) -> None:
        started = self._monotonic()
        records: list[Record] = [Epoch(self.boot, self.epoch, True, {}, [])]
        if self.canary.result is not None:
            records.append(CanaryOutcome(self.canary.result))
        new = [sighting for sighting in self.ledger.observations.remembered if sighting.sentinels]
        records.append(Flush(self.seq, dict(self.proofs), self.ledger.dump(), new))
        journal.compact(records)
        log.info("journal rewritten: %d bytes in %.0f ms", journal.size, (self._monotonic() - started) * 1000)

    def _journal_failed(self, error: OSError) -> None:
        log.error("no journal, a restart will begin an empty epoch: %s", error)
        self._metrics.journal_errors.inc()
        self._metrics.journal_bytes.set(0)
