"""Keys, decision, ingest, restart and hand-over: times count only where the answers or bytes are the right ones."""

import json
from array import array
from dataclasses import replace

import pytest

from bench import shm_transfer
from bench.feed import router_index, router_ingest
from bench.feed.fake_sidecars import Curve
from bench.placing import decision_time, index_forms, large_fleet, request_path
from bench.placing.request_path import COLD, NAIVE, TINY, WARM, AnswersDifferError, Naive, Timed, measure, rows
from bench.placing.workload import BLOCK_SIZE, build, split, steps, vllm_payload
from mmrouter_lib import native
from mmrouter_lib.block_keys import block_keys
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_router.fleet.index import Index

PLACED = build(workers=4, blocks_per_worker=300, queries=6)
LOAD = build(workers=3, blocks_per_worker=200, queries=2)


def test_the_same_seed_gives_the_same_workload_and_another_seed_another():
    assert build(workers=3, blocks_per_worker=200, queries=2) == LOAD
    assert build(workers=3, blocks_per_worker=200, queries=2, seed=2) != LOAD


def test_every_worker_holds_as_many_blocks_as_it_should_each_once_and_after_its_parent():
    for worker in range(LOAD.workers):
        events = [event for event in LOAD.events if event.worker == worker]
        held: set[int] = set()
        for event in events:
            assert event.parent is None or event.parent in held
            assert not held & set(event.hashes)
            held.update(event.hashes)
        assert len(held) == 200


def test_an_event_reads_as_vllms_and_carries_the_keys_of_its_tokens():
    for event in LOAD.events:
        (stored,) = decode_batch(vllm_payload(event)).events
        assert (stored.hashes, stored.parent, stored.ids) == (tuple(event.hashes), event.parent, event.ids)
    first = next(event for event in LOAD.events if event.parent is None)
    assert block_keys(first.ids, BLOCK_SIZE, (), 0x6D6D) == first.keys


def test_split_events_store_the_same_blocks_in_the_same_order():
    small = list(split(LOAD.events, 1))
    assert all(len(event.hashes) == 1 and len(event.ids) == BLOCK_SIZE for event in small)
    assert [h for event in small for h in event.hashes] == [h for event in LOAD.events for h in event.hashes]
    known: set[tuple[int, int]] = set()
    for event in small:
        assert event.parent is None or (event.worker, event.parent) in known
        known.add((event.worker, event.hashes[0]))


def test_steps_hold_every_event_once_each_of_one_worker_and_each_workers_in_order():
    small = list(split(LOAD.events, 1))
    batches = list(steps(small, 16))
    assert {len(batch) for batch in batches} == {16, 200 % 16}
    assert all(event.worker == batch[0].worker for batch in batches for event in batch)
    for worker in range(LOAD.workers):
        mine = [event for batch in batches for event in batch if event.worker == worker]
        assert mine == [event for event in small if event.worker == worker]
    assert len(decode_batch(vllm_payload(*batches[0])).events) == 16


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setenv("MMROUTER_BENCH_PEERS", "none")
    monkeypatch.setattr(request_path, "PROMPT_TOKENS", 400)


def test_equal_answers_give_rows_and_the_missing_peer_is_named():
    rows = decision_time.compare(PLACED)
    assert all(item.value is not None and item.value > 0 for item in rows if "Dynamo" not in item.name)
    missing = [item for item in rows if "Dynamo" in item.name]
    assert missing
    assert all(item.value is None and item.met is None and item.peer.startswith("not run: ") for item in missing)


def test_an_index_that_claims_a_block_too_many_is_found(monkeypatch):
    honest = Index.leading
    lying = lambda *asked: [depth + 1 for depth in honest(*asked)]  # noqa: E731
    monkeypatch.setattr(Index, "leading", lying)
    with pytest.raises(decision_time.AnswersDifferError, match="query 0: ours has"):
        decision_time.compare(PLACED)


def test_an_index_that_loses_a_stored_block_is_found(monkeypatch):
    honest = Index.store
    monkeypatch.setattr(Index, "store", lambda self, slot, keys: honest(self, slot, list(keys)[1:]))
    with pytest.raises(decision_time.AnswersDifferError):
        decision_time.compare(PLACED)


def test_both_forms_of_the_index_are_measured():
    rows = {item.name: item for item in index_forms.measure(3, 200)}
    assert len(rows) == (6 if native.form == "native" else 4)
    for what in ("store, per block", "match, per prompt"):
        assert rows[f"index, 3 workers: {what}, Python"].value
        compiled = rows[f"index, 3 workers: {what}, compiled"]
        assert compiled.value if native.form == "native" else compiled.peer == f"not run: {native.why}"


def test_forms_of_the_index_that_differ_are_found(compiled, monkeypatch):
    honest = index_forms.empty

    def lying(form, workers):
        index = honest(form, workers)
        if form == "native":
            index.store(0, [1])
        return index

    monkeypatch.setattr(index_forms, "empty", lying)
    with pytest.raises(AnswersDifferError):
        index_forms.measure(3, 200)


def test_a_peer_that_answers_less_is_found():
    with pytest.raises(decision_time.AnswersDifferError, match="answered 1 queries"):
        decision_time.require_equal({"ours": [1, 2], "peer": [1]})


async def test_both_ways_have_equal_tokens_and_overlaps_or_nothing_is_said(monkeypatch):
    monkeypatch.setattr(request_path, "NAIVE_EVERY", 1)
    monkeypatch.setattr(request_path, "PROMPT_TOKENS", 1024)
    figures = await measure("tiny tokenizer", TINY, rounds=2)
    assert all(item.value for item in figures)
    answer = Naive.route
    monkeypatch.setattr(Naive, "route", lambda naive, raw: (answer(naive, raw)[0], -1))
    with pytest.raises(AnswersDifferError, match="request 1"):
        await measure("tiny tokenizer", TINY, rounds=1)


async def test_a_cold_image_is_another_one_to_the_router_and_the_conversation_is_the_same(monkeypatch):
    monkeypatch.setattr(request_path, "PROMPT_TOKENS", 256)
    ours = request_path.Ours(TINY)
    bodies = request_path.RequestBodies(ours)
    warm, cold = bodies.body(1), bodies.body(1, image=1)
    assert len(warm) > request_path.IMAGE_BYTES
    await ours.fill(warm)
    (sent, ids, overlap), (_, same, none) = await ours.route(warm), await ours.route(cold)
    await ours.close()
    assert ids == same == array("I", ids)
    assert overlap > none
    assert json.loads(sent)["messages"][1]["content"][0]["uuid"]


def test_figures_are_medians_and_ratios_to_the_naive_way():
    timed = Timed({WARM: [2.0, 2.0, 9.0], COLD: [8.5] * 3, NAIVE: [40.0]})
    figures = {item.name.partition(": ")[2]: item for item in rows("tiny", timed)}
    assert (figures["warm, p50"].value, figures["warm, p50"].met) == (2.0, True)
    assert (figures["cold image, p50"].value, figures["cold image, p50"].met) == (8.5, False)
    assert figures["warm, below the naive way"].value == 20.0


SHARED = build(workers=8, blocks_per_worker=1200, queries=0)
FED = build(workers=3, blocks_per_worker=120, queries=0)
CASE = router_ingest.IngestCase("64-block events", FED, FED.events)


@pytest.mark.parametrize(("blocks", "step", "deltas"), [(64, 1, len(FED.events)), (1, 1, FED.blocks), (1, 50, 3 * 3)])
def test_real_sockets_carry_every_block_in_deltas_of_any_size(blocks, step, deltas):
    case = replace(CASE, events=tuple(split(FED.events, blocks)), step=step)
    assert len(case.deltas()) == deltas
    assert case.held == [120] * 3
    assert router_ingest.receive(case, case.deltas()) > 0


def test_a_delta_that_is_lost_makes_the_run_fail():
    with pytest.raises(RuntimeError, match="instead of 360"):
        router_ingest.receive(CASE, CASE.deltas()[:-1])


def test_rows_name_the_missing_peer_or_the_ratio_to_it():
    missing = router_ingest.rows(CASE, [0.2], 1.0, [], "no index")
    assert [item.value is None for item in missing] == [False, True, True]
    assert missing[1].peer == "not run: no index"
    rows = router_ingest.rows(CASE, [0.2], 0.0, [1.6], "")
    assert [item.value for item in rows[1:]] == [8.0, 8.0]
    assert [item.met for item in rows[1:]] == [True, True]


def test_the_feeds_half_grows_by_something_when_all_blocks_are_there():
    assert router_index.index_growth(SHARED) >= 0  # it raises where blocks are missing


def test_a_block_of_many_workers_is_one_unique_block_and_a_missing_peer_a_reason():
    unique = len({key for event in SHARED.events for key in event.keys})
    assert unique < SHARED.blocks == 9600
    rows = router_index.memory_rows(SHARED, 100 * unique, 200 * unique, "")
    assert [item.value for item in rows] == [100.0, float(f"{100 * unique / 9600:.4g}"), 0.5]
    assert [item.met for item in rows] == [None, None, True]
    ratio = router_index.memory_rows(SHARED, 1000, None, "no index")[-1]
    assert (ratio.value, ratio.peer) == (None, "not run: no index")


def test_snapshots_hold_as_many_blocks_as_asked_for():
    held = router_index.snapshots(3, 120)
    assert [len(set(keys)) for keys in held] == [120] * 3


def test_a_router_over_sidecars_with_blocks_becomes_exact():
    held = [array("Q", range(1, 50)), array("Q", range(20, 40))]
    made = router_index.started(2, Curve.fresh(), held)
    assert min(made.seconds, made.resident) > 0


def test_a_router_that_does_not_hold_what_it_should_is_no_figure(monkeypatch):
    monkeypatch.setattr(router_index, "LIMIT_SECONDS", 5.0)
    monkeypatch.setattr(router_index.Ours, "ready", lambda router: True)
    monkeypatch.setattr(router_index.Ours, "held_blocks", lambda router: {"uid-0": 1})
    with pytest.raises(TimeoutError, match="uid-0"):
        router_index.started(1, Curve.fresh(), [])


PAYLOAD_BYTES = 1 << 20


def test_a_hand_over_brings_what_was_written_and_every_payload_has_its_times():
    times = shm_transfer.measure(PAYLOAD_BYTES, 3, 4)
    counts = [len(values) for values in (times.copy, times.write, times.read)]
    assert counts == [12] * 3
    assert min(times.ratios) > 0


def test_a_hand_over_of_something_else_ends_the_run(monkeypatch):
    honest = shm_transfer.Pool.put
    monkeypatch.setattr(shm_transfer.Pool, "put", lambda self, payload, name: honest(self, payload[::-1], name))
    with pytest.raises(AnswersDifferError, match="payload 0"):
        shm_transfer.measure(PAYLOAD_BYTES, 1, 1)


def test_the_first_row_of_a_hand_over_is_its_ratio_to_a_copy():
    ratio, *_ = shm_transfer.rows(shm_transfer.Times([1.0], [1.1], [0.1]), 16 * shm_transfer.MB, 8)
    assert (ratio.name, ratio.value, ratio.met) == ("ratio_to_memcpy, 16 MB", 1.2, True)


def test_placements_in_a_large_fleet_are_timed_by_prompt_by_change_and_in_turns(monkeypatch):
    monkeypatch.setattr(large_fleet, "SIZES", (4,))
    monkeypatch.setattr(large_fleet, "QUERIES", 20)
    monkeypatch.setattr(large_fleet, "BLOCKS_PER_WORKER", 80)
    names = [row.name for row in large_fleet.run() if row.value]
    ways = ("kv", "after a change", "round robin")
    assert names == [f"placement, 4 workers, {way}: {share}" for way in ways for share in ("p50", "p99")]
