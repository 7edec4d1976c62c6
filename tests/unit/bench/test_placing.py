"""Benchmarks of prompt, keys and decision: times count only where all implementations give the same answer."""

import json
from array import array

import pytest

from bench.placing import decision_time, request_path, tokenization
from bench.placing.block_workload import BLOCK_SIZE, build, split, steps, vllm_payload
from bench.placing.request_path import COLD, NAIVE, WARM, AnswersDifferError, Naive, Timed, measure, rows
from bench.placing.tokenization import TINY
from mmrouter_lib.block_keys import block_keys
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_router.fleet.index import Index
from mmrouter_router.scheduling.scoring import Candidate, choose

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
def no_peers(monkeypatch):
    monkeypatch.setenv("MMROUTER_BENCH_PEERS", "none")


def test_equal_answers_give_rows_and_the_missing_peer_is_named():
    rows = decision_time.compare(PLACED)
    assert all(item.value is not None and item.value > 0 for item in rows if "Dynamo" not in item.name)
    missing = [item for item in rows if "Dynamo" in item.name]
    assert missing
    assert all(item.value is None and item.met is None and item.peer.startswith("not run: ") for item in missing)


def test_an_index_that_claims_a_block_too_many_is_found(monkeypatch):
    honest = Index.match
    lying = lambda *asked: {slot: depth + 1 for slot, depth in honest(*asked).items()}  # noqa: E731
    monkeypatch.setattr(Index, "match", lying)
    with pytest.raises(decision_time.AnswersDifferError, match="query 0: ours has"):
        decision_time.compare(PLACED)


def test_an_index_that_loses_a_stored_block_is_found(monkeypatch):
    honest = Index.store
    monkeypatch.setattr(Index, "store", lambda self, slot, keys: honest(self, slot, list(keys)[1:]))
    with pytest.raises(decision_time.AnswersDifferError):
        decision_time.compare(PLACED)


def test_a_peer_that_answers_less_is_found():
    with pytest.raises(decision_time.AnswersDifferError, match="answered 1 queries"):
        decision_time.require_equal({"ours": [1, 2], "peer": [1]})


@pytest.mark.parametrize("policy", ["kv", "leastLoaded", "roundRobin", "consistentHash"])
def test_the_fast_choice_is_the_first_of_the_ranking(policy):
    ours = decision_time.Ours(PLACED)
    for number, depth in enumerate((0, 3, 3, 9)):
        rows = [
            Candidate(f"w{n}", f"w{n}", "p", min(n, depth), 10, prefill=number % 2 * n, held=n % 2) for n in range(7)
        ]
        choice = choose(rows, policy=policy, overlap_weight=1.0, fingerprint=number, turn=number)
        assert choice.winner == choice.scores[0].candidate
    assert ours.decide(PLACED.queries[0]) >= 0


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(tokenization, "PROMPT_TOKENS", 400)
    monkeypatch.setattr(tokenization, "TURNS", 2)


def test_the_rows_of_a_tokenizer_name_the_uncached_call_as_their_peer():
    p50, p99, ratio = tokenization.measure("tiny", tokenization.TINY)
    assert p50.value > 0
    assert p99.value >= p50.value
    assert ratio.peer.startswith("the whole text: p50 ")


def test_a_cache_that_gives_other_ids_is_no_figure(monkeypatch):
    class Forgetful(tokenization.SegmentCache):
        def __call__(self, text, *, add_special_tokens):
            return super().__call__(text[1:], add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenization, "SegmentCache", Forgetful)
    with pytest.raises(tokenization.AnswersDifferError):
        tokenization.measure("tiny", tokenization.TINY)


def test_a_real_tokenizer_that_is_not_there_is_said_to_be_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenization, "REAL", tmp_path / "Qwen")
    assert tokenization.run()[-1].peer == "not run: no folder Qwen"


async def test_both_ways_have_equal_tokens_and_overlaps_or_nothing_is_said(monkeypatch):
    monkeypatch.setattr(request_path, "NAIVE_EVERY", 1)
    monkeypatch.setattr(request_path, "PROMPT_TOKENS", 1024)
    found = await measure("tiny tokenizer", TINY, rounds=2)
    assert all(item.value for item in found)
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
    found = {item.name.partition(": ")[2]: item for item in rows("tiny", timed)}
    assert (found["warm, p50"].value, found["warm, p50"].met) == (2.0, True)
    assert (found["cold image, p50"].value, found["cold image, p50"].met) == (8.5, False)
    assert found["warm, below the naive way"].value == 20.0
