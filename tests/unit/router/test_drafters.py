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
    assert (overlap(rig, tokens), worker.recomputed_blocks(tokens, BLOCK)) == (4, 0)


@pytest.mark.parametrize(("beyond", "recomputed"), [(0, 0), (1, 1)])
def test_beside_states_the_block_of_the_last_token_may_be_the_one_that_is_computed_anew(beyond, recomputed):
    rig, tokens = Rig(), 4 * BLOCK + beyond
    keys = block_keys(prompt(tokens), BLOCK, (), SEED)
    worker = rig.worker("a", drafter="drops", groups=GROUPS, all_groups=True)
    rig.sync(worker, keys)
    rig.delta(worker, keys)
    rig.delta(worker, [keys[2]], group=1)
    assert overlap(rig, tokens) == 3
    assert worker.recomputed_blocks(tokens, BLOCK) == recomputed


def test_an_unknown_drafter_makes_a_decision_bounded():
    rig = Rig()
    rig.worker("a", drafter="unknown")
    decision = rig.placer.place(prepared())
    assert (decision.exactness, decision.reasons) == ("bounded", ("cache_groups:drafter",))
