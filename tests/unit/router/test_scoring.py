"""The choice is a pure function: explained, deterministic, and right on the field's example."""

import dataclasses
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mmrouter_router.scheduling.candidate_columns import column_getter
from mmrouter_router.scheduling.scoring import WEIGHTS, Candidate, CandidateTable, Weights, choose


def candidate(name: str, **values) -> Candidate:
    return Candidate(id=f"{name}/boot#0", name=name, pool="worker", **{"overlap": 0, "blocks": 10, **values})


LOADS = dict.fromkeys(("prefill", "active", "waiting"), st.floats(0, 50))
BLOCKS = {"overlap": st.integers(0, 10), "held": st.integers(0, 100), "coming": st.integers(0, 5)}
BELOW = {"unproved": st.integers(0, 5), "tier": st.integers(0, 5), "fetch": st.sampled_from([0.0, 0.5, 2.0])}
CANDIDATE = st.builds(
    Candidate,
    id=st.text("abcdef", min_size=1, max_size=4),
    **{"name": st.just("n"), "pool": st.just("p"), "blocks": st.just(10), "scored": st.booleans()},
    **{**LOADS, **BLOCKS, **BELOW, "encode": st.floats(0, 20)},
)
CANDIDATES = st.lists(CANDIDATE, min_size=1, max_size=8, unique_by=lambda c: c.id)


FIELD = Weights(compute=1.0, decode=1.0)  # of the field's cost function, whose example is a test here


def pick(candidates, policy="kv", **options):
    return choose(
        candidates, policy=policy, **{"overlap_weight": 1.0, "fingerprint": 7, "turn": 0, "weights": WEIGHTS, **options}
    )


def test_best_tradeoff_of_overlap_and_load_wins():
    rows = [candidate(n, overlap=o, active=a) for n, o, a in (("a", 2, 10), ("b", 5, 5), ("c", 8, 9))]
    choice = pick(rows, weights=FIELD)
    assert choice.winner.name == "b"
    assert {s.candidate.name: s.cost for s in choice.scores} == {"a": 18, "b": 10, "c": 11}


@given(CANDIDATES, st.integers(0, 2**63), st.sampled_from(["kv", "leastLoaded", "roundRobin", "consistentHash"]))
def test_choice_does_not_depend_on_candidate_order(rows, fingerprint, policy):
    forward = pick(rows, policy=policy, fingerprint=fingerprint, turn=3)
    backward = pick(rows[::-1], policy=policy, fingerprint=fingerprint, turn=3)
    assert forward.winner == backward.winner
    assert [s.candidate.id for s in forward.scores] == [s.candidate.id for s in backward.scores]


def hit(row):
    return row.overlap + row.unproved + row.tier + row.coming if row.scored else 0


@given(CANDIDATES, st.builds(Weights, compute=st.floats(0.1, 10), decode=st.floats(0.001, 1)))
def test_kv_never_prefers_a_dominated_candidate(rows, weights):
    best = pick(rows, weights=weights).winner
    for row in rows:
        loads = [(best.prefill, row.prefill), (best.active, row.active), (best.waiting, row.waiting)]
        loads += [(best.encode, row.encode), (best.fetch, row.fetch)]
        worse = hit(best) < hit(row) and all(b > r for b, r in loads)
        assert not worse


@given(CANDIDATES, st.data())
def test_more_overlap_or_less_load_never_ranks_lower(rows, data):
    number = data.draw(st.integers(0, len(rows) - 1))
    row = rows[number]
    blocks, costs = ("overlap", "unproved", "tier", "coming"), ("encode", "fetch", "prefill", "active", "waiting")
    name = data.draw(st.sampled_from([*blocks, *costs]))
    value = getattr(row, name)
    better = replace(row, **{name: value + 3 if name in blocks else value / 2})
    ids = [s.candidate.id for s in pick(rows).scores]
    after = [s.candidate.id for s in pick([*rows[:number], better, *rows[number + 1 :]]).scores]
    assert after.index(row.id) <= ids.index(row.id)


@given(CANDIDATES, st.sampled_from(["kv", "leastLoaded"]), st.integers(0, 2**63), st.sampled_from([0.0, 0.5, 1.0]))
def test_winner_is_the_first_of_all_scores(rows, policy, fingerprint, weight):
    bare = [replace(row, encode=0.0, unproved=0, tier=0, fetch=0.0, scored=True) for row in rows]
    idle = [replace(row, prefill=0.0, active=0.0, waiting=0.0) for row in bare]
    for case in (rows, bare, idle, idle * 40):
        numbered = [replace(row, id=f"{row.id}{number}") for number, row in enumerate(case)]
        choice = pick(numbered, policy=policy, fingerprint=fingerprint, overlap_weight=weight)
        assert choice.winner == choice.scores[0].candidate == numbered[choice.row]


@given(CANDIDATES)
def test_empty_column_equals_zeros(rows):
    empty = {"coming": 0, "encode": 0.0, "waiting": 0.0, "unproved": 0, "tier": 0, "fetch": 0.0}
    bare = CandidateTable.of([replace(row, **empty) for row in rows])
    short = dataclasses.replace(bare, **dict.fromkeys(empty, ()))
    assert list(short) == list(bare)
    assert list(CandidateTable.joined([short, CandidateTable.of(rows)])) == [*bare, *rows]
    assert short[len(rows) - 1] == bare[len(rows) - 1]
    for policy in ("kv", "leastLoaded"):
        assert short.costs(policy, 1.0, WEIGHTS) == bare.costs(policy, 1.0, WEIGHTS)
        assert pick(short, policy).winner == pick(bare, policy).winner


@given(CANDIDATES)
def test_score_terms_add_up_to_the_cost_and_zero_overlap_weight_ignores_caches(rows):
    for score in pick(rows).scores:
        assert score.cost == pytest.approx(sum(score.terms.values()))
    bare = [replace(row, overlap=0, coming=0, encode=0.0, unproved=0, tier=0, fetch=0.0) for row in rows]
    assert pick(rows, overlap_weight=0.0).winner.id == pick(bare, overlap_weight=0.0).winner.id


def test_unverified_overlap_does_not_count():
    rows = [candidate("a", overlap=10, scored=False), candidate("b", overlap=1)]
    assert pick(rows).winner.name == "b"
    assert pick([candidate("a", coming=10, scored=False), candidate("b", overlap=1)]).winner.name == "b"


def test_holder_wins_until_its_queue_outweighs_recomputing():
    rows = [candidate("holder", overlap=6), candidate("idle")]
    longest = 6 * WEIGHTS.compute
    assert pick([replace(rows[0], prefill=longest - 1), rows[1]]).winner.name == "holder"
    assert pick([replace(rows[0], prefill=longest + 1), rows[1]]).winner.name == "idle"


def test_blocks_being_computed_count_as_held():
    rows = [candidate("holder", overlap=4), candidate("busy", overlap=2, coming=5)]
    choice = pick(rows)
    assert choice.winner.name == "busy"
    assert choice.reason.endswith("2 of 10 blocks held, 5 more being computed")


def test_round_robin_finds_what_the_candidates_hold_on_average():
    rows = [candidate(name, overlap=held) for name, held in (("a", 6), ("b", 0), ("c", 3))]
    assert pick(rows).round_robin == 3


def test_regret_is_what_a_verified_candidate_held_beyond_the_hit_of_the_winner():
    busy = candidate("busy", overlap=6, prefill=6 * WEIGHTS.compute)
    assert pick([busy, candidate("idle", overlap=2)]).regret == 4
    assert pick([busy, candidate("computes", overlap=2, coming=3)]).regret == 1
    assert pick([candidate("a", overlap=6, scored=False), candidate("b", overlap=2)]).regret == 0
    assert pick([candidate("a", overlap=6, scored=False), busy], policy="leastLoaded").regret == 6
    assert pick([candidate("a", overlap=6), candidate("b", overlap=2)]).regret == 0


def test_encoding_adds_to_the_cost_of_missing_blocks():
    rows = [candidate("text", overlap=5, encode=3.0), candidate("image", overlap=5, prefill=4.0)]
    assert pick(rows).winner.name == "image"
    assert pick(rows, weights=Weights(compute=1.0)).winner.name == "text"


def test_round_robin_visits_each_candidate_once_per_round():
    rows = [candidate(n) for n in "abcd"]
    assert sorted(pick(rows, policy="roundRobin", turn=t).winner.name for t in range(4)) == list("abcd")


def test_consistent_hash_moves_only_requests_of_a_removed_candidate():
    rows = [candidate(n) for n in "abcd"]
    before = {f: pick(rows, policy="consistentHash", fingerprint=f).winner.name for f in range(200)}
    after = {f: pick(rows[:-1], policy="consistentHash", fingerprint=f).winner.name for f in range(200)}
    assert all(after[f] == name for f, name in before.items() if name != "d")
    assert len(set(after.values())) == 3


def test_ties_go_to_the_emptier_cache_then_the_hash():
    rows = [candidate("a", held=5), candidate("b", held=3)]
    assert pick(rows).winner.name == "b"
    equal = [candidate("a"), candidate("b"), candidate("c")]
    assert {pick(equal, fingerprint=f).winner.name for f in range(50)} == {"a", "b", "c"}
    assert len({pick(equal, fingerprint=9).winner.name for _ in range(5)}) == 1


def test_no_candidate_raises_value_error():
    with pytest.raises(ValueError, match="no candidate"):
        pick([])


@given(st.lists(st.integers(-1, 60), min_size=1, unique=True), st.booleans())
def test_a_getter_takes_the_entries_of_its_rows(rows, in_order):
    column = array("q", range(100, 161))
    rows = sorted(rows) if in_order else rows
    for values in (column, list(column)):
        assert list(column_getter(rows)(values)) == [values[row] for row in rows]
    assert column == array("q", range(100, 161))
