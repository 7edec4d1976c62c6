"""Hits beside a drafter that reads hidden states: an engine computes the last block that it found anew."""

from array import array

import pytest
from unit.router.rig import BLOCK, SEED, Rig, prepared

from mmrouter_lib.block_keys import block_keys
from mmrouter_lib.cache_layout import CacheGroup

GROUPS = (CacheGroup(0, "full_attention", 0, BLOCK), CacheGroup(1, "mamba", 0, BLOCK))


def prompt(tokens: int) -> "array[int]":
    return array("I", range(tokens))


def overlap(rig: Rig, tokens: int) -> int:
    return rig.placer.place(prepared(ids=prompt(tokens))).choice.winner.overlap


@pytest.mark.parametrize(("beyond", "hit"), [(0, 2), (1, 3), (BLOCK - 1, 3)])
def test_of_one_group_the_last_block_of_a_hit_is_not_promised(beyond, hit):
    rig, tokens = Rig(), 4 * BLOCK + beyond
    keys = block_keys(prompt(tokens), BLOCK, (), SEED)
    rig.worker("a", keys, drafter="drops")
    assert overlap(rig, tokens) == hit
    assert overlap(rig, 2 * BLOCK + 1) == 1


def test_without_a_drafter_every_held_block_is_promised():
    rig, tokens = Rig(), 4 * BLOCK + 1
    worker = rig.worker("a", block_keys(prompt(tokens), BLOCK, (), SEED))
    assert (overlap(rig, tokens), worker.layout.recomputed_blocks(tokens, BLOCK)) == (4, 0)


@pytest.mark.parametrize(("beyond", "recomputed"), [(0, 0), (1, 1)])
def test_beside_states_the_block_of_the_last_token_may_be_the_one_that_is_computed_anew(beyond, recomputed):
    rig, tokens = Rig(), 4 * BLOCK + beyond
    keys = block_keys(prompt(tokens), BLOCK, (), SEED)
    worker = rig.worker("a", drafter="drops", groups=GROUPS, all_groups=True)
    rig.sync(worker, keys)
    rig.delta(worker, keys)
    rig.delta(worker, [keys[2]], group=1)
    assert overlap(rig, tokens) == 3
    assert worker.layout.recomputed_blocks(tokens, BLOCK) == recomputed


def test_before_vllm_0_32_beside_states_the_block_before_the_last_token_is_computed_anew():
    """0.30 and 0.31 look no further than the last token, so of exactly n blocks they hit n - 2."""
    rig, tokens = Rig(), 4 * BLOCK
    keys = block_keys(prompt(tokens), BLOCK, (), SEED)
    worker = rig.worker("a", drafter="drops", groups=GROUPS, all_groups=True, engine_version="0.31.0")
    rig.sync(worker, keys)
    rig.delta(worker, keys)
    rig.delta(worker, [keys[1], keys[2]], group=1)
    assert (overlap(rig, tokens), worker.layout.recomputed_blocks(tokens, BLOCK)) == (2, 1)
    rig.beat(worker, drafter="drops", groups=GROUPS, all_groups=True, engine_version="0.32.0")
    assert (overlap(rig, tokens), worker.layout.recomputed_blocks(tokens, BLOCK)) == (3, 0)


def test_an_unknown_drafter_makes_a_decision_bounded():
    rig = Rig()
    rig.worker("a", drafter="unknown")
    decision = rig.placer.place(prepared())
    assert (decision.exactness, decision.reasons) == ("bounded", ("cache_groups:drafter",))


LOOKAHEAD = (CacheGroup(0, "full_attention", 0, BLOCK, lookahead=1),)


@pytest.mark.parametrize("drafter", ["drops", "unknown"])
@pytest.mark.parametrize(("beyond", "hit"), [(0, 3), (1, 4), (BLOCK - 1, 4)])
def test_with_lookahead_hashes_a_drafter_costs_no_block(drafter, beyond, hit):
    rig, tokens = Rig(), 4 * BLOCK + beyond
    keys = block_keys(prompt(tokens), BLOCK, (), SEED, 1)
    worker = rig.worker("a", keys, drafter=drafter, groups=LOOKAHEAD, all_groups=True)
    decision = rig.placer.place(prepared(ids=prompt(tokens)))
    assert (decision.choice.winner.overlap, decision.exactness) == (hit, "exact")
    assert worker.layout.recomputed_blocks(tokens, BLOCK) == 0


def test_a_prompt_that_continues_otherwise_does_not_hit_the_block_before():
    rig = Rig()
    rig.worker("a", block_keys(prompt(4 * BLOCK + 1), BLOCK, (), SEED, 1), groups=LOOKAHEAD, all_groups=True)
    parting = array("I", [*range(2 * BLOCK), *range(1000, 1000 + 2 * BLOCK)])
    assert rig.placer.place(prepared(ids=parting)).choice.winner.overlap == 1


def test_both_forms_of_keys_stand_side_by_side():
    """Each pool is looked up by keys of its own form, and the better one is chosen whichever form it has."""
    rig, tokens = Rig(), 6 * BLOCK + 1
    plain, ahead = (block_keys(prompt(tokens), BLOCK, (), SEED, lookahead) for lookahead in (0, 1))
    rig.worker("plain", plain[:2])
    better = rig.worker("ahead", ahead[:5], groups=LOOKAHEAD, all_groups=True)
    decision = rig.placer.place(prepared(ids=prompt(tokens)))
    assert sorted(decision.choice.candidates.overlap) == [2, 5]
    assert (decision.target.worker, decision.fresh) == (better, ahead[5:])


def test_an_older_sidecar_that_tells_no_lookahead_promises_nothing_of_its_blocks():
    rig, tokens = Rig(), 4 * BLOCK + 1
    rig.worker("a", block_keys(prompt(tokens), BLOCK, (), SEED, 1), drafter="drops")
    assert overlap(rig, tokens) == 0


def test_without_full_attention_blocks_with_a_lookahead_bound_the_promise():
    groups = (CacheGroup(0, "sliding_window", 2 * BLOCK, BLOCK, lookahead=1),)
    rig = Rig()
    rig.worker("a", drafter="drops", groups=groups, all_groups=True)
    decision = rig.placer.place(prepared())
    assert (decision.exactness, decision.reasons) == ("bounded", ("cache_groups:lookahead",))
