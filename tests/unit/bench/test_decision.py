"""Times count only where every implementation gives the same answer."""

import pytest

from bench.placing import decision_time
from bench.placing.block_workload import build
from mmrouter_router.fleet.index import Index
from mmrouter_router.scheduling.scoring import Candidate, choose

LOAD = build(workers=4, blocks_per_worker=300, queries=6)


@pytest.fixture(autouse=True)
def no_peers(monkeypatch):
    monkeypatch.setenv("MMROUTER_BENCH_PEERS", "none")


def test_equal_answers_give_rows_and_the_missing_peer_is_named():
    rows = decision_time.compare(LOAD)
    assert all(item.value is not None and item.value > 0 for item in rows if "Dynamo" not in item.name)
    missing = [item for item in rows if "Dynamo" in item.name]
    assert missing
    assert all(item.value is None and item.met is None and item.peer.startswith("not run: ") for item in missing)


def test_an_index_that_claims_a_block_too_many_is_found(monkeypatch):
    honest = Index.match
    lying = lambda *asked: {slot: depth + 1 for slot, depth in honest(*asked).items()}  # noqa: E731
    monkeypatch.setattr(Index, "match", lying)
    with pytest.raises(decision_time.AnswersDifferError, match="query 0: ours has"):
        decision_time.compare(LOAD)


def test_an_index_that_loses_a_stored_block_is_found(monkeypatch):
    honest = Index.store
    monkeypatch.setattr(Index, "store", lambda self, slot, keys: honest(self, slot, list(keys)[1:]))
    with pytest.raises(decision_time.AnswersDifferError):
        decision_time.compare(LOAD)


def test_a_peer_that_answers_less_is_found():
    with pytest.raises(decision_time.AnswersDifferError, match="answered 1 queries"):
        decision_time.require_equal({"ours": [1, 2], "peer": [1]})


@pytest.mark.parametrize("policy", ["kv", "leastLoaded", "roundRobin", "consistentHash"])
def test_the_fast_choice_is_the_first_of_the_ranking(policy):
    ours = decision_time.Ours(LOAD)
    for number, depth in enumerate((0, 3, 3, 9)):
        rows = [
            Candidate(f"w{n}", f"w{n}", "p", min(n, depth), 10, prefill=number % 2 * n, held=n % 2) for n in range(7)
        ]
        choice = choose(rows, policy=policy, overlap_weight=1.0, fingerprint=number, turn=number)
        assert choice.winner == choice.scores[0].candidate
    assert ours.decide(LOAD.queries[0]) >= 0
