"""The relay without sockets: numbering, snapshots, replay, detail, epochs, the journal and the canary."""

import itertools
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mmrouter_lib import feed
from mmrouter_lib.block_keys import unpack_keys
from mmrouter_lib.engines.sglang.identity import run_ids, sentinels
from mmrouter_sidecar.blocks import journal as journal_module
from mmrouter_sidecar.engine.event_order import digest_of
from mmrouter_sidecar.feed import relay as relay_module
from mmrouter_sidecar.feed.relay import DISCONNECTED, EventRelay
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Settings, SettingsError


class Bench:
    """A relay, everything that it published, and a way to feed it random engine batches."""

    def __init__(self, settings: Settings, kit: Any, seed: int = 0) -> None:
        self.frames: list[Any] = []
        self.settings, self.kit, self.chance = settings, kit, random.Random(seed)
        self.relay = EventRelay(settings, Metrics(), self.frames.append)
        self.numbers = itertools.count()
        self.held: list[int] = []
        self.hashes = itertools.count(1)

    def batch(self, *events: Any, rank: int = 0) -> None:
        raw = self.kit.batch(*events, rank=rank)
        self.relay.batch(rank, next(self.numbers), raw, digest_of(raw))

    def anything(self) -> None:
        """One random batch: mostly new blocks, some second copies, removals, a rare clear."""
        choice = self.chance.random()
        if choice < 0.6 or not self.held:
            parent = self.chance.choice([None, *self.held])
            new = [next(self.hashes) for _ in range(self.chance.randint(1, 4))]
            self.held += new
            self.batch(self.kit.stored(new, parent))
        elif choice < 0.7:
            again = self.chance.choice(self.held)
            self.held.append(again)
            self.batch(self.kit.stored([again]))
        elif choice < 0.97:
            self.batch(self.kit.removed(self.held.pop(self.chance.randrange(len(self.held)))))
        else:
            self.held.clear()
            self.batch(self.kit.CLEARED)

    def of(self, kind: type) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def ask(self, request: Any) -> list[Any]:
        return list(self.relay.answer(request))

    def index(self) -> dict[Any, set[int]]:
        return self.kit.keys_of(self.ask(feed.SnapshotRequest(1)))

    @property
    def state(self) -> Any:
        relay = self.relay
        held = {place: dict(cache.blocks) for place, cache in relay.ledger.tables.items() if cache.blocks}
        copies = {place: dict(cache.copies) for place, cache in relay.ledger.tables.items() if cache.copies}
        return relay.worker, relay.epoch, relay.seq, held, copies, dict(relay.proofs), relay.canary.result


@pytest.fixture
def bench(settings: Settings, kit: Any) -> Iterator[Bench]:
    one = Bench(settings, kit)
    yield one
    one.relay.close()


@given(seed=st.integers(0, 2**32), steps=st.integers(0, 60))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_a_snapshot_and_its_deltas_equal_the_ledger(
    settings: Settings, kit: Any, tmp_path: Path, seed: int, steps: int
) -> None:
    bench = Bench(replace(settings, state_dir=Path(tempfile.mkdtemp(dir=tmp_path))), kit, seed)
    cuts: list[list[Any]] = [bench.ask(feed.SnapshotRequest(1))]
    for _ in range(steps):
        bench.anything()
        if bench.chance.random() < 0.5:
            bench.relay.flush()
        if bench.chance.random() < 0.2:
            cuts.append(bench.ask(feed.SnapshotRequest(1)))
    bench.relay.flush()
    deltas = bench.of(feed.Delta)
    assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
    final = bench.index()
    for cut in cuts:
        index = kit.keys_of(cut)
        (replay,) = bench.ask(feed.ReplayRequest(2, bench.relay.epoch, cut[0].seq + 1))
        assert not replay.gone
        assert list(replay.deltas) == [delta for delta in deltas if delta.seq > cut[0].seq]
        for delta in replay.deltas:
            kit.follow(index, delta)
        assert index == final
    bench.relay.close()


@given(seed=st.integers(0, 2**32), share=st.floats(0, 1))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_a_journal_cut_at_any_byte_restores_an_earlier_state(
    settings: Settings, kit: Any, tmp_path: Path, seed: int, share: float
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    bench = Bench(replace(settings, state_dir=folder), kit, seed)
    states = [bench.state]
    for _ in range(25):
        bench.anything()
        if bench.chance.random() < 0.5:
            bench.relay.flush()
            states.append(bench.state)
        if bench.chance.random() < 0.05:
            bench.relay.flush()
            states.append(bench.state)
            bench.relay.lost(0, "history")
            states.append(bench.state)
        if bench.chance.random() < 0.05:
            bench.held.clear()
            bench.relay.engine_ended(DISCONNECTED)
            states.append(bench.state)
    bench.relay.flush()
    states.append(bench.state)
    bench.relay.close()
    file = folder / "ledger.journal"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    again = Bench(bench.settings, kit)
    if share == 1:
        assert again.state == states[-1]
    elif again.state not in states:
        # Cut within the head or the first record: nothing is known, so a new epoch begins empty.
        assert again.state[3:6] == ({}, {}, {})
        assert again.relay.epoch >= states[0][1]
        assert again.relay.boot not in {state[0].split("/")[1] for state in states}
    before = again.index()
    again.batch(kit.stored([10**6]))
    again.relay.flush()
    again.relay.close()
    third = Bench(bench.settings, kit)
    assert third.index() != before
    assert third.state == again.state
    third.relay.close()


def test_a_journal_is_read_up_to_the_first_changed_byte(bench: Bench, kit: Any) -> None:
    states = [bench.state]
    for number in range(1, 6):
        bench.batch(kit.stored([number]))
        bench.relay.flush()
        states.append(bench.state)
    bench.relay.close()
    file = bench.settings.state_dir / "ledger.journal"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    again = Bench(bench.settings, kit)
    assert again.state in states[1:-1]
    again.relay.close()


def test_flushed_batches_survive_a_kill_and_others_are_replayed(bench: Bench, kit: Any) -> None:
    bench.batch(kit.stored([1]))
    bench.relay.flush()
    flushed = bench.state
    bench.batch(kit.stored([2], 1))
    again = Bench(bench.settings, kit)  # the first one never closed anything
    assert again.state == flushed
    assert again.relay.proofs[0][0] == 0
    again.relay.close()


def test_a_restart_keeps_numbers_and_names_but_not_the_delta_history(bench: Bench, kit: Any) -> None:
    bench.batch(kit.stored([1, 2]))
    bench.relay.flush()
    held = bench.index()
    bench.relay.close()
    again = Bench(bench.settings, kit)
    assert (again.relay.worker, again.relay.epoch, again.relay.seq) == (bench.relay.worker, bench.relay.epoch, 1)
    assert again.index() == held
    assert again.relay.proofs == bench.relay.proofs
    assert again.ask(feed.ReplayRequest(1, again.relay.epoch, 1))[0].gone
    assert again.ask(feed.ReplayRequest(1, again.relay.epoch, 2)) == [feed.ReplayPart(1, (), last=True)]
    assert again.ask(feed.DetailRequest(1, again.relay.epoch, 1, 1))[0].gone
    again.batch(kit.stored([3], 2))
    again.relay.flush()
    assert [delta.seq for delta in again.of(feed.Delta)] == [2]
    again.relay.close()


def test_a_rewritten_journal_holds_the_same_state(bench: Bench, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MIN_COMPACT_BYTES", 2000)
    sizes = []
    for _ in range(300):
        bench.anything()
        bench.relay.flush()
        sizes.append((bench.settings.state_dir / "ledger.journal").stat().st_size)
    assert any(after < before for before, after in itertools.pairwise(sizes)), "it was rewritten"
    bench.relay.canary.claim(feed.CanaryClaim(1, bench.relay.epoch, "r", 1.0), 0.0)
    canary = feed.CanaryReport(bench.relay.epoch, "True", router="r")
    assert bench.ask(feed.CanaryResult(1, canary)) == [feed.Accepted(1)]
    state = bench.state
    bench.relay.close()
    (bench.settings.state_dir / "ledger.new").write_bytes(b"left by a killed rewriting")
    again = Bench(bench.settings, kit)
    assert again.state == state
    assert again.state[-1] == canary
    again.relay.close()


def test_a_journal_of_another_model_or_key_is_discarded(bench: Bench, kit: Any) -> None:
    bench.batch(kit.stored([1, 2]))
    bench.relay.close()
    for change in ({"model": "other"}, {"identity_key": bytes(32)}):
        again = Bench(replace(bench.settings, **change), kit)
        assert again.relay.ledger.held == 0
        assert again.relay.boot != bench.relay.boot
        again.relay.close()


def test_a_full_disk_ends_the_journal_and_not_the_sidecar(
    bench: Bench, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.batch(kit.stored([1]))
    bench.relay.flush()
    full, write = os.open("/dev/full", os.O_WRONLY), os.write
    monkeypatch.setattr(os, "write", lambda _, raw: write(full, raw))
    bench.batch(kit.stored([2], 1))
    bench.relay.flush()
    monkeypatch.undo()
    os.close(full)
    assert bench.of(feed.Delta)[-1].seq == 2
    assert not (bench.settings.state_dir / "ledger.journal").exists()
    bench.relay.close()
    again = Bench(bench.settings, kit)
    assert again.relay.ledger.held == 0, "a restart begins honestly empty"
    assert again.relay.boot != bench.relay.boot
    assert again.relay.epoch > bench.relay.epoch
    again.relay.close()


def test_an_unwritable_state_folder_disables_the_journal(settings: Settings, kit: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bench = Bench(replace(settings, state_dir=tmp_path / "file" / "below"), kit)
    bench.batch(kit.stored([1]))
    bench.relay.flush()
    assert bench.of(feed.Delta)


def test_the_engines_end_begins_an_empty_epoch_under_a_new_name(bench: Bench, kit: Any) -> None:
    bench.batch(kit.stored([1]))
    bench.relay.flush()
    bench.relay.update_facts(state="up", version="1")
    worker, epoch = bench.relay.worker, bench.relay.epoch
    bench.relay.engine_ended(DISCONNECTED)
    beat = bench.of(feed.Heartbeat)[-1]
    assert beat.worker != worker
    assert (beat.worker.split("/")[0], beat.seq, beat.engine_state, beat.engine_version) == ("pod-1", 0, "down", "")
    assert beat.epoch > epoch
    assert bench.index() == {}
    (empty,) = bench.ask(feed.SnapshotRequest(5))
    assert (empty.id, empty.keys, empty.last, empty.epoch) == (5, b"", True, beat.epoch)


def test_lost_history_of_one_rank_keeps_the_others_and_the_name(bench: Bench, kit: Any) -> None:
    bench.batch(kit.stored([1]), rank=0)
    bench.batch(kit.stored([2]), rank=1)
    bench.relay.flush()
    worker, epoch = bench.relay.worker, bench.relay.epoch
    assert not bench.relay.lost(0, "history")
    assert bench.relay.worker == worker
    assert bench.relay.epoch > epoch
    assert {place[0] for place in bench.index()} == {1}
    assert not [delta for delta in bench.of(feed.Delta) if delta.epoch > epoch], "an epoch begins with a snapshot"


def test_requests_for_an_old_epoch_are_refused(bench: Bench) -> None:
    old = bench.relay.epoch
    bench.relay.engine_ended(DISCONNECTED)
    for request in (feed.ReplayRequest(1, old, 1), feed.DetailRequest(2, old, 1, 1), feed.CanaryClaim(3, old, "r", 1)):
        (reply,) = bench.ask(request)
        assert isinstance(reply, feed.Refused)
        assert reply.id == request.id
        assert str(old) in reply.reason


def test_an_unreadable_batch_empties_its_rank_and_the_stream_goes_on(bench: Bench, kit: Any) -> None:
    bench.batch(kit.stored([1]))
    bench.batch(kit.stored([1]), rank=1)
    bench.relay.flush()
    bench.relay.batch(0, 7, b"\xc1", digest_of(b"\xc1"))
    bench.relay.flush()
    last = bench.of(feed.Delta)[-1]
    assert (last.rank, last.cleared, last.stored) == (0, True, b"")
    assert {place[0] for place in bench.index()} == {1}
    assert bench.relay.ledger.counts["undecodable"] == 1
    bench.batch(kit.stored([3]))
    assert {place[0] for place in bench.index()} == {0, 1}


def test_detail_returns_the_batches_behind_a_delta_as_the_engine_sent_them(bench: Bench, kit: Any) -> None:
    payloads = [kit.batch(kit.stored([n])) for n in (1, 2, 3)]
    for seq, raw in enumerate(payloads[:2]):
        bench.relay.batch(0, seq, raw, digest_of(raw))
    bench.relay.flush()
    bench.relay.batch(0, 2, payloads[2], digest_of(payloads[2]))
    bench.relay.flush()
    (part,) = bench.ask(feed.DetailRequest(9, bench.relay.epoch, 1, 1))
    assert [(batch.engine_seq, batch.payload) for batch in part.batches] == [(0, payloads[0]), (1, payloads[1])]
    (part,) = bench.ask(feed.DetailRequest(9, bench.relay.epoch, 2, 2))
    assert [batch.payload for batch in part.batches] == [payloads[2]]
    assert not part.gone


def test_histories_are_bounded_and_report_missing_parts(settings: Settings, kit: Any) -> None:
    bench = Bench(replace(settings, buffer_events=5), kit)
    for number in range(1, 11):
        bench.batch(kit.stored([number]))
        bench.relay.flush()
    epoch = bench.relay.epoch
    assert bench.ask(feed.ReplayRequest(1, epoch, 5))[0].gone
    (part,) = bench.ask(feed.ReplayRequest(1, epoch, 6))
    assert [delta.seq for delta in part.deltas] == [6, 7, 8, 9, 10]
    assert bench.ask(feed.DetailRequest(1, epoch, 5, 6))[0].gone
    assert [batch.seq for batch in bench.ask(feed.DetailRequest(1, epoch, 6, 7))[0].batches] == [6, 7]
    bench.relay.close()


def test_long_answers_come_in_parts_of_bounded_size(bench: Bench, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "SNAPSHOT_PART_KEYS", 10)
    for number in range(600):
        bench.batch(kit.stored([number + 1]))
        bench.relay.flush()
    parts = bench.ask(feed.SnapshotRequest(1))
    assert len(parts) == 60
    assert all(len(unpack_keys(part.keys)) <= 10 for part in parts)
    assert [part.last for part in parts] == [False] * 59 + [True]
    assert {part.seq for part in parts} == {600}
    parts = bench.ask(feed.ReplayRequest(1, bench.relay.epoch, 1))
    assert sum(len(part.deltas) for part in parts) == 600
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 1


def test_heartbeats_report_every_change_once(bench: Bench) -> None:
    before = len(bench.of(feed.Heartbeat))
    bench.relay.update_facts(state="up", version="0.32.0")
    bench.relay.update_facts(state="up", version="0.32.0")
    bench.relay.update_facts(draining=True)
    bench.relay.update_facts(block_size=32, digests={"config.json": "ab"}, revision="c0ffee")
    beats = bench.of(feed.Heartbeat)[before:]
    assert [beat.engine_state for beat in beats] == ["up"] * 3
    assert beats[-1].draining
    assert (beats[-1].block_size, beats[-1].digests, beats[-1].revision) == (32, {"config.json": "ab"}, "c0ffee")


def test_one_router_holds_the_canary_and_its_result_lasts_for_the_epoch(bench: Bench) -> None:
    epoch = bench.relay.epoch

    def claim(router: str) -> Any:
        return bench.ask(feed.CanaryClaim(1, epoch, router, 30))[0]

    assert claim("a") == feed.ClaimAnswer(1, True, "a")
    assert claim("b") == feed.ClaimAnswer(1, False, "a")
    assert claim("a").granted, "the holder may ask again"
    stranger = feed.CanaryResult(2, feed.CanaryReport(epoch, "True", router="b"))
    assert isinstance(bench.ask(stranger)[0], feed.Refused)
    unknown = feed.CanaryReport(epoch, "Unknown", "timeout", router="a")
    assert bench.ask(feed.CanaryResult(3, unknown)) == [feed.Accepted(3)]
    assert claim("b").granted, "an unknown result may be tried again"
    result = feed.CanaryReport(epoch, "False", "identity", "block 2 differs", 4, "b")
    assert bench.ask(feed.CanaryResult(4, result)) == [feed.Accepted(4)]
    assert bench.of(feed.Heartbeat)[-1].canary == result
    assert claim("a") == feed.ClaimAnswer(1, False, "b")
    assert isinstance(bench.ask(feed.CanaryResult(5, feed.CanaryReport(epoch, "True", router="b")))[0], feed.Refused)
    bench.relay.engine_ended(DISCONNECTED)
    assert bench.of(feed.Heartbeat)[-1].canary is None


def test_a_claim_ends_with_its_lease(settings: Settings, kit: Any) -> None:
    now = [0.0]
    relay = EventRelay(settings, Metrics(), lambda frame: None, monotonic=lambda: now[0])
    ask = feed.CanaryClaim(1, relay.epoch, "a", 5.0)
    assert next(iter(relay.answer(ask))).granted  # type: ignore[union-attr]
    other = msgspec.structs.replace(ask, router="b")
    assert not next(iter(relay.answer(other))).granted  # type: ignore[union-attr]
    now[0] = 5.1
    assert next(iter(relay.answer(other))).granted  # type: ignore[union-attr]
    relay.close()


def test_an_unknown_engine_type_is_an_error(settings: Settings) -> None:
    with pytest.raises(SettingsError, match="other"):
        EventRelay(replace(settings, engine="other"), Metrics(), lambda frame: None)


def test_groups_are_published_before_the_first_delta_that_needs_them(bench: Bench, kit: Any) -> None:
    before = len(bench.frames)
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    bench.batch(kit.stored([1], **window), kit.stored([1], group_idx=1, kv_cache_spec_kind="full_attention"))
    bench.relay.flush()
    beat, *deltas = bench.frames[before:]
    assert beat.groups == (feed.CacheGroup(0, "sliding_window", 8), feed.CacheGroup(1, "full_attention"))
    assert beat.seq == 0, "what it announces has not been sent yet"
    assert {delta.group for delta in deltas} == {0, 1}
    bench.batch(kit.stored([2], 1, **window))
    bench.relay.flush()
    assert not [frame for frame in bench.frames[before + 1 :] if isinstance(frame, feed.Heartbeat)]
    bench.relay.close()
    again = Bench(bench.settings, kit)
    again.relay.beat()
    assert again.of(feed.Heartbeat)[-1].groups == beat.groups
    again.relay.engine_ended(DISCONNECTED)
    assert again.of(feed.Heartbeat)[-1].groups == ()
    again.relay.close()


def test_observations_are_sent_on_request_and_dropped_with_the_engine(
    bench: Bench, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.ask(feed.ObservationsRequest(3)) == [feed.ObservationsPart(3, (), last=True)]
    for number in range(3):
        bench.batch(kit.stored([number + 1], extra_keys=[[[f"image-{number}", 0]]]))
    bench.relay.flush()
    published = tuple(bench.of(feed.ImageObservation))
    assert len(published) == 3
    assert bench.ask(feed.ObservationsRequest(4)) == [feed.ObservationsPart(4, published, last=True)]
    monkeypatch.setattr(relay_module, "OBSERVATIONS_PART", 2)
    parts = bench.ask(feed.ObservationsRequest(5))
    assert [(len(part.sightings), part.last) for part in parts] == [(2, False), (1, True)]
    bench.relay.engine_ended(DISCONNECTED)
    assert bench.ask(feed.ObservationsRequest(6)) == [feed.ObservationsPart(6, (), last=True)]


def test_a_restarted_sidecar_keeps_sentinel_observations(
    settings: Settings, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines do not repeat sentinels, because a held image is hit and not stored again."""
    bench = Bench(replace(settings, engine="sglang"), kit)
    ids = [7, 8, *run_ids(sentinels(5, legacy=False), 6)]
    bench.batch(
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": ids, "block_size": 8}
    )
    bench.relay.flush()
    (sighting,) = bench.of(feed.ImageObservation)
    assert (sighting.parent, sighting.offset, sighting.sentinels) == (None, 2, sentinels(5, legacy=False))
    bench.relay.close()
    again = Bench(bench.settings, kit)
    assert again.ask(feed.ObservationsRequest(1))[0].sightings == (sighting,)
    monkeypatch.setattr(journal_module, "MIN_COMPACT_BYTES", 0)
    monkeypatch.setattr(journal_module, "COMPACT_FACTOR", 0)
    again.batch({"type": "AllBlocksCleared"})
    again.relay.flush()  # rewrites the journal
    again.relay.close()
    third = Bench(bench.settings, kit)
    assert third.ask(feed.ObservationsRequest(1))[0].sightings == (sighting,)
    third.relay.close()


def test_a_routers_work_is_published_to_all_without_an_answer(bench: Bench) -> None:
    work = feed.Work("router-a", 0, 2, 12.5, 80.0)
    assert bench.ask(work) == []
    assert bench.of(feed.Work) == [work]
