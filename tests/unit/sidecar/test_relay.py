"""The relay without sockets: numbering, snapshots, replay, detail, epochs, the journal and the canary."""

import itertools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from unit.sidecar.conftest import CLEARED, batch, follow, keys_of, removed, stored
from unit.sidecar.relay_bench import Bench

from mmrouter_lib import feed
from mmrouter_lib.block_keys import unpack_keys
from mmrouter_lib.cache_layout import CacheGroup
from mmrouter_lib.engines.sglang.identity import run_ids, sentinels
from mmrouter_lib.settings_errors import SettingsError
from mmrouter_sidecar.blocks import journal as journal_module
from mmrouter_sidecar.engine.event_order import digest_of
from mmrouter_sidecar.feed import relay as relay_module
from mmrouter_sidecar.feed.relay import DISCONNECTED, EventRelay
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Settings


@pytest.fixture
def bench(settings: Settings) -> Iterator[Bench]:
    bench = Bench(settings)
    yield bench
    bench.close()


@given(seed=st.integers(0, 2**32), steps=st.integers(0, 60))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_a_snapshot_and_its_deltas_equal_the_ledger(settings: Settings, tmp_path: Path, seed: int, steps: int) -> None:
    bench = Bench(replace(settings, state_dir=Path(tempfile.mkdtemp(dir=tmp_path))), seed)
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
        index = keys_of(cut)
        (replay,) = bench.ask(feed.ReplayRequest(2, bench.relay.epoch, cut[0].seq + 1))
        assert not replay.gone
        assert list(replay.deltas) == [delta for delta in deltas if delta.seq > cut[0].seq]
        for delta in replay.deltas:
            follow(index, delta)
        assert index == final
    bench.relay.close()


@given(seed=st.integers(0, 2**32), share=st.floats(0, 1))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_a_journal_cut_at_any_byte_restores_an_earlier_state(
    settings: Settings, tmp_path: Path, seed: int, share: float
) -> None:
    bench = Bench(replace(settings, state_dir=Path(tempfile.mkdtemp(dir=tmp_path))), seed)
    states = bench.states
    for _ in range(25):
        bench.anything()
        if bench.chance.random() < 0.5:
            bench.record()
        if bench.chance.random() < 0.05:
            bench.record()
            bench.relay.lost(0, "history")
            states.append(bench.state)
        if bench.chance.random() < 0.05:
            bench.held.clear()
            bench.relay.engine_ended(DISCONNECTED)
            states.append(bench.state)
    bench.record()
    bench.relay.close()
    whole = bench.journal.read_bytes()
    bench.journal.write_bytes(whole[: int(len(whole) * share)])
    again = Bench(bench.settings)
    if share == 1:
        assert again.state == states[-1]
    elif again.state not in states:
        # Cut within the head or the first record: nothing is known, so a new epoch begins empty.
        assert again.state[3:6] == ({}, {}, {})
        assert again.relay.epoch >= states[0][1]
        assert again.relay.boot not in {state[0].split("/")[1] for state in states}
    before = again.index()
    again.flushed(stored([10**6]))
    third = again.reopened()
    assert third.index() != before
    assert third.state == again.state
    third.relay.close()


def test_a_journal_is_read_up_to_the_first_changed_byte(bench: Bench) -> None:
    for number in range(1, 6):
        bench.batch(stored([number]))
        bench.record()
    raw = bytearray(bench.journal.read_bytes())
    raw[len(raw) // 2] ^= 1
    bench.journal.write_bytes(raw)
    assert bench.reopened().state in bench.states[1:-1]


def test_flushed_batches_survive_a_kill_and_others_are_replayed(bench: Bench) -> None:
    bench.batch(stored([1]))
    bench.record()
    bench.batch(stored([2], 1))
    again = bench.reopened(killed=True)
    assert again.state == bench.states[-1]
    assert again.relay.proofs[0][0] == 0


def test_a_restart_keeps_numbers_and_names_but_not_the_delta_history(bench: Bench) -> None:
    bench.flushed(stored([1, 2]))
    held = bench.index()
    again = bench.reopened()
    assert (again.relay.worker, again.relay.epoch, again.relay.seq) == (bench.relay.worker, bench.relay.epoch, 1)
    assert again.index() == held
    assert again.relay.proofs == bench.relay.proofs
    assert again.ask(feed.ReplayRequest(1, again.relay.epoch, 1))[0].gone
    assert again.ask(feed.ReplayRequest(1, again.relay.epoch, 2)) == [feed.ReplayPart(1, (), last=True)]
    assert again.ask(feed.DetailRequest(1, again.relay.epoch, 1, 1))[0].gone
    again.flushed(stored([3], 2))
    assert [delta.seq for delta in again.of(feed.Delta)] == [2]


def test_a_rewritten_journal_holds_the_same_state(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MIN_COMPACT_BYTES", 2000)
    sizes = []
    for _ in range(300):
        bench.anything()
        bench.relay.flush()
        sizes.append(bench.journal.stat().st_size)
    assert any(after < before for before, after in itertools.pairwise(sizes)), "it was rewritten"
    bench.relay.canary.claim(feed.CanaryClaim(1, bench.relay.epoch, "r", 1.0), 0.0)
    canary = feed.CanaryReport(bench.relay.epoch, "True", router="r")
    assert bench.ask(feed.CanaryResult(1, canary)) == [feed.Accepted(1)]
    state = bench.state
    bench.relay.close()
    bench.journal.with_name("ledger.new").write_bytes(b"left by a killed rewriting")
    again = bench.reopened()
    assert again.state == state
    assert again.state[-1] == canary


def test_a_canarys_result_does_not_journal_a_waiting_batch_twice(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MIN_COMPACT_BYTES", 0)
    monkeypatch.setattr(journal_module, "COMPACT_FACTOR", 0)  # every record rewrites the journal
    bench.relay.canary.claim(feed.CanaryClaim(1, bench.relay.epoch, "r", 1.0), 0.0)
    bench.batch(stored([1]))
    canary = feed.CanaryReport(bench.relay.epoch, "True", router="r")
    assert bench.ask(feed.CanaryResult(1, canary)) == [feed.Accepted(1)]
    monkeypatch.undo()
    bench.relay.flush()
    again = bench.reopened()
    again.flushed(removed(1))
    assert set().union(*again.index().values()) == set(), "it was stored once, and removed once"


def test_a_journal_of_another_model_or_key_is_discarded(bench: Bench) -> None:
    bench.batch(stored([1, 2]))
    bench.relay.close()
    for change in ({"model": "other"}, {"identity_key": bytes(32)}):
        again = bench.reopened(**change)
        assert again.relay.ledger.held == 0
        assert again.relay.boot != bench.relay.boot


def test_a_full_disk_ends_the_journal_and_not_the_sidecar(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.flushed(stored([1]))
    full, write = os.open("/dev/full", os.O_WRONLY), os.write
    monkeypatch.setattr(os, "write", lambda _, raw: write(full, raw))
    bench.flushed(stored([2], 1))
    monkeypatch.undo()
    os.close(full)
    assert bench.of(feed.Delta)[-1].seq == 2
    assert not bench.journal.exists()
    again = bench.reopened()
    assert again.relay.ledger.held == 0, "a restart begins honestly empty"
    assert again.relay.boot != bench.relay.boot
    assert again.relay.epoch > bench.relay.epoch


def test_an_unwritable_state_folder_disables_the_journal(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    unwritable = bench.reopened(state_dir=tmp_path / "file" / "below")
    unwritable.flushed(stored([1]))
    assert unwritable.of(feed.Delta)


def test_the_engines_end_begins_an_empty_epoch_under_a_new_name(bench: Bench) -> None:
    bench.flushed(stored([1]))
    bench.relay.update_facts(state="up", version="1")
    worker, epoch = bench.relay.worker, bench.relay.epoch
    bench.relay.engine_ended(DISCONNECTED)
    beat = bench.beats[-1]
    assert beat.worker != worker
    assert (beat.worker.split("/")[0], beat.seq, beat.engine_state, beat.engine_version) == ("pod-1", 0, "down", "")
    assert beat.epoch > epoch
    assert bench.index() == {}
    (empty,) = bench.ask(feed.SnapshotRequest(5))
    assert (empty.id, empty.keys, empty.last, empty.epoch) == (5, b"", True, beat.epoch)


def test_lost_history_of_one_rank_keeps_the_others_and_the_name(bench: Bench) -> None:
    bench.batch(stored([1]), rank=0)
    bench.flushed(stored([2]), rank=1)
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


def test_an_unreadable_batch_empties_its_rank_and_the_stream_goes_on(bench: Bench) -> None:
    bench.batch(stored([1]))
    bench.flushed(stored([1]), rank=1)
    bench.relay.batch(0, 7, b"\xc1", digest_of(b"\xc1"))
    bench.relay.flush()
    last = bench.of(feed.Delta)[-1]
    assert (last.rank, last.cleared, last.stored) == (0, True, b"")
    assert {place[0] for place in bench.index()} == {1}
    assert bench.relay.ledger.counts["undecodable"] == 1
    bench.batch(stored([3]))
    assert {place[0] for place in bench.index()} == {0, 1}


def test_detail_returns_the_batches_behind_a_delta_as_the_engine_sent_them(bench: Bench) -> None:
    payloads = [batch(stored([n])) for n in (1, 2, 3)]
    bench.batch(stored([1]))
    bench.flushed(stored([2]))
    bench.flushed(stored([3]))
    (part,) = bench.ask(feed.DetailRequest(9, bench.relay.epoch, 1, 1))
    assert [(batch.engine_seq, batch.payload) for batch in part.batches] == [(0, payloads[0]), (1, payloads[1])]
    (part,) = bench.ask(feed.DetailRequest(9, bench.relay.epoch, 2, 2))
    assert [batch.payload for batch in part.batches] == [payloads[2]]
    assert not part.gone


def test_histories_are_bounded_and_report_missing_parts(bench: Bench) -> None:
    bounded = bench.reopened(buffer_events=5)
    for number in range(1, 11):
        bounded.flushed(stored([number]))
    epoch = bounded.relay.epoch
    assert bounded.ask(feed.ReplayRequest(1, epoch, 5))[0].gone
    (part,) = bounded.ask(feed.ReplayRequest(1, epoch, 6))
    assert [delta.seq for delta in part.deltas] == [6, 7, 8, 9, 10]
    assert bounded.ask(feed.DetailRequest(1, epoch, 5, 6))[0].gone
    assert [batch.seq for batch in bounded.ask(feed.DetailRequest(1, epoch, 6, 7))[0].batches] == [6, 7]


def test_long_answers_come_in_parts_of_bounded_size(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "SNAPSHOT_PART_KEYS", 10)
    for number in range(600):
        bench.flushed(stored([number + 1]))
    parts = bench.ask(feed.SnapshotRequest(1))
    assert all(len(unpack_keys(part.keys)) <= 10 for part in parts)
    assert [(part.last, part.seq) for part in parts] == [(False, 600)] * 59 + [(True, 600)]
    first, *others = bench.ask(feed.ReplayRequest(1, bench.relay.epoch, 1))
    assert sum(len(part.deltas) for part in (first, *others)) == 600
    assert [first.last, *(part.last for part in others)] == [False] * len(others) + [True]


def test_heartbeats_report_every_change_once(bench: Bench) -> None:
    before = len(bench.beats)
    for change in ({"state": "up", "version": "0.32.0"}, {"state": "up", "version": "0.32.0"}, {"draining": True}):
        bench.relay.update_facts(**change)
    bench.relay.update_facts(block_size=32, digests={"config.json": "ab"}, revision="c0ffee")
    beats = bench.beats[before:]
    assert [beat.engine_state for beat in beats] == ["up"] * 3
    assert beats[-1].draining
    assert (beats[-1].block_size, beats[-1].digests, beats[-1].revision) == (32, {"config.json": "ab"}, "c0ffee")


def test_one_router_holds_the_canary_and_its_result_lasts_for_the_epoch(bench: Bench) -> None:
    epoch = bench.relay.epoch

    def claim(router: str) -> Any:
        return bench.ask(feed.CanaryClaim(1, epoch, router, 30))[0]

    def report(*result: Any, router: str) -> Any:
        return bench.ask(feed.CanaryResult(2, feed.CanaryReport(epoch, *result, router=router)))[0]

    assert claim("a") == feed.ClaimAnswer(1, True, "a")
    assert claim("b") == feed.ClaimAnswer(1, False, "a")
    assert claim("a").granted, "the holder may ask again"
    assert isinstance(report("True", router="b"), feed.Refused)
    assert report("Unknown", "timeout", router="a") == feed.Accepted(2)
    assert claim("b").granted, "an unknown result may be tried again"
    assert report("False", "identity", "block 2 differs", 4, router="b") == feed.Accepted(2)
    assert bench.beats[-1].canary == feed.CanaryReport(epoch, "False", "identity", "block 2 differs", 4, "b")
    assert claim("a") == feed.ClaimAnswer(1, False, "b")
    assert isinstance(report("True", router="b"), feed.Refused)
    bench.relay.engine_ended(DISCONNECTED)
    assert bench.beats[-1].canary is None


def test_a_claim_ends_with_its_lease(settings: Settings) -> None:
    now = [0.0]
    relay = EventRelay(settings, Metrics(), lambda frame: None, monotonic=lambda: now[0])
    for router, time, granted in (("a", 0.0, True), ("b", 0.0, False), ("b", 5.1, True)):
        now[0] = time
        (answer,) = relay.answer(feed.CanaryClaim(1, relay.epoch, router, 5.0))
        assert answer.granted is granted  # type: ignore[union-attr]
    relay.close()


def test_an_unknown_engine_type_is_an_error(settings: Settings) -> None:
    with pytest.raises(SettingsError, match="other"):
        EventRelay(replace(settings, engine="other"), Metrics(), lambda frame: None)


def test_groups_are_published_before_the_first_delta_that_needs_them(bench: Bench) -> None:
    before = len(bench.frames)
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    bench.flushed(stored([1], **window), stored([1], group_idx=1, kv_cache_spec_kind="full_attention"))
    beat, *deltas = bench.frames[before:]
    assert beat.groups == (CacheGroup(1, "full_attention", 0, 2), CacheGroup(0, "sliding_window", 8, 2))
    assert beat.seq == 0, "what it announces has not been sent yet"
    assert {delta.group for delta in deltas} == {0, 1}
    bench.flushed(stored([2], 1, **window))
    assert not [frame for frame in bench.frames[before + 1 :] if isinstance(frame, feed.Heartbeat)]
    again = bench.reopened()
    again.relay.beat()
    assert again.beats[-1].groups == beat.groups
    again.relay.engine_ended(DISCONNECTED)
    assert again.beats[-1].groups == ()


def test_observations_are_sent_on_request_and_dropped_with_the_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.ask(feed.ObservationsRequest(3)) == [feed.ObservationsPart(3, (), last=True)]
    for number in range(3):
        bench.flushed(stored([number + 1], extra_keys=[[[f"image-{number}", 0]]]))
    published = tuple(bench.of(feed.ImageObservation))
    assert len(published) == 3
    assert bench.ask(feed.ObservationsRequest(4)) == [feed.ObservationsPart(4, published, last=True)]
    monkeypatch.setattr(relay_module, "OBSERVATIONS_PART", 2)
    parts = bench.ask(feed.ObservationsRequest(5))
    assert [(len(part.sightings), part.last) for part in parts] == [(2, False), (1, True)]
    bench.relay.engine_ended(DISCONNECTED)
    assert bench.ask(feed.ObservationsRequest(6)) == [feed.ObservationsPart(6, (), last=True)]


def test_a_restarted_sidecar_keeps_sentinel_observations(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines do not repeat sentinels, because a held image is hit and not stored again."""
    first = bench.reopened(engine="sglang")
    first.flushed(stored([1], ids=[7, 8, *run_ids(sentinels(5, legacy=False), 6)], size=8))
    (sighting,) = first.of(feed.ImageObservation)
    assert (sighting.parent, sighting.offset, sighting.sentinels) == (None, 2, sentinels(5, legacy=False))
    again = first.reopened()
    assert again.ask(feed.ObservationsRequest(1))[0].sightings == (sighting,)
    monkeypatch.setattr(journal_module, "MIN_COMPACT_BYTES", 0)
    monkeypatch.setattr(journal_module, "COMPACT_FACTOR", 0)
    again.flushed(CLEARED)  # rewrites the journal
    assert again.reopened().ask(feed.ObservationsRequest(1))[0].sightings == (sighting,)


def test_a_routers_work_is_published_to_all_without_an_answer(bench: Bench) -> None:
    work = feed.Work("router-a", 0, 2, 12.5, 80.0)
    assert bench.ask(work) == []
    assert bench.of(feed.Work) == [work]
