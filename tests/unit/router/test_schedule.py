"""The choice is a pure function: explained, deterministic, and right on the field's example."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mmrouter_router.schedule import Candidate, choose


def candidate(name: str, **values) -> Candidate:
    return Candidate(id=f"{name}/boot#0", name=name, pool="worker", **{"overlap": 0, "blocks": 10, **values})


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        id=st.text("abcdef", min_size=1, max_size=4),
        name=st.just("n"),
        pool=st.just("p"),
        overlap=st.integers(0, 10),
        blocks=st.just(10),
        prefill=st.floats(0, 50),
        active=st.floats(0, 50),
        waiting=st.floats(0, 50),
        held=st.integers(0, 100),
        scored=st.booleans(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda c: c.id,
)


def pick(candidates, policy="kv", overlap_weight=1.0, fingerprint=7, turn=0):
    return choose(candidates, policy=policy, overlap_weight=overlap_weight, fingerprint=fingerprint, turn=turn)


def test_case_51_of_the_field_the_middle_one_wins():
    rows = [candidate(n, overlap=o, active=a) for n, o, a in (("a", 2, 10), ("b", 5, 5), ("c", 8, 9))]
    choice = pick(rows)
    assert choice.winner.name == "b"
    assert {s.candidate.name: s.cost for s in choice.scores} == {"a": 18, "b": 10, "c": 11}


@given(CANDIDATES, st.integers(0, 2**63), st.sampled_from(["kv", "leastLoaded", "roundRobin", "consistentHash"]))
def test_the_choice_does_not_depend_on_the_order_of_candidates(rows, fingerprint, policy):
    forward = pick(rows, policy=policy, fingerprint=fingerprint, turn=3)
    backward = pick(rows[::-1], policy=policy, fingerprint=fingerprint, turn=3)
    assert forward.winner == backward.winner
    assert [s.candidate.id for s in forward.scores] == [s.candidate.id for s in backward.scores]


@given(CANDIDATES)
def test_kv_never_prefers_a_candidate_that_is_worse_in_everything(rows):
    best = pick(rows).winner
    for row in rows:
        overlap = row.overlap if row.scored else 0
        won = best.overlap if best.scored else 0
        worse = won < overlap and best.prefill > row.prefill and best.active > row.active and best.waiting > row.waiting
        assert not worse


@given(CANDIDATES)
def test_the_terms_of_a_score_add_up_to_its_cost(rows):
    for score in pick(rows).scores:
        assert score.cost == pytest.approx(sum(score.terms.values()))


def test_an_unverified_candidates_overlap_does_not_count():
    rows = [candidate("a", overlap=10, scored=False), candidate("b", overlap=1)]
    assert pick(rows).winner.name == "b"


def test_an_idle_candidate_beats_a_holder_that_is_busier_than_the_overlap_is_worth():
    rows = [candidate("holder", overlap=6, active=9), candidate("idle")]
    assert pick(rows).winner.name == "idle"
    assert pick([replace(rows[0], active=5), rows[1]]).winner.name == "holder"


def test_round_robin_visits_every_candidate_once_per_round():
    rows = [candidate(n) for n in "abcd"]
    assert sorted(pick(rows, policy="roundRobin", turn=t).winner.name for t in range(4)) == list("abcd")


def test_consistent_hash_moves_only_the_requests_of_the_candidate_that_left():
    rows = [candidate(n) for n in "abcd"]
    before = {f: pick(rows, policy="consistentHash", fingerprint=f).winner.name for f in range(200)}
    after = {f: pick(rows[:-1], policy="consistentHash", fingerprint=f).winner.name for f in range(200)}
    assert all(after[f] == name for f, name in before.items() if name != "d")
    assert len(set(after.values())) == 3


def test_equal_costs_go_to_the_emptier_cache_and_then_to_the_rendezvous_hash():
    rows = [candidate("a", held=5), candidate("b", held=3)]
    assert pick(rows).winner.name == "b"
    equal = [candidate("a"), candidate("b"), candidate("c")]
    assert {pick(equal, fingerprint=f).winner.name for f in range(50)} == {"a", "b", "c"}
    assert len({pick(equal, fingerprint=9).winner.name for _ in range(5)}) == 1


def test_no_candidate_is_the_callers_error():
    with pytest.raises(ValueError, match="no candidate"):
        pick([])
