"""The index answers exactly what sets of keys per candidate would answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.cache_layout import window_blocks
from mmrouter_router.fleet.holder_table import bits, mask_of
from mmrouter_router.fleet.index import HitRule, Index, TailRule

pytestmark = pytest.mark.usefixtures("form")

KEYS = st.lists(st.integers(0, 40), max_size=12)
STEP = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 5), KEYS),
    st.tuples(st.just("remove"), st.integers(0, 5), KEYS),
    st.tuples(st.just("replace"), st.integers(0, 5), KEYS),
    st.tuples(st.just("sweep"), st.integers(1, 7), KEYS),
)


def leading(held: set[int], keys: list[int]) -> int:
    for depth, key in enumerate(keys):
        if key not in held:
            return depth
    return len(keys)


@given(st.lists(STEP, max_size=40), KEYS)
def test_index_matches_a_model_of_sets(steps, prompt):
    index = Index()
    slots = [index.join() for _ in range(6)]
    model: list[set[int]] = [set() for _ in slots]
    for action, number, keys in steps:
        if action == "store":
            index.store(slots[number], keys)
            model[number] |= set(keys)
        elif action == "remove":
            index.remove(slots[number], keys)
            model[number] -= set(keys)
        elif action == "replace":
            index.retire(slots[number])
            slots[number] = index.join()
            model[number] = set()
        else:
            index.sweep(budget=number)
    assert [index.held(slot) for slot in slots] == [len(held) for held in model]
    assert [index.keys(slot) for slot in slots] == model
    assert index.match(prompt, slots) == {slot: leading(held, prompt) for slot, held in zip(slots, model, strict=True)}
    while index.sweep(budget=3):
        pass
    assert len(index) == len(set().union(*model))


def alone(slot: int, need: int) -> HitRule:
    """The rule of a cache with one window."""
    return HitRule(0, (TailRule(need, 1 << slot),))


def longest_hit(
    keys: list[int], whole: list[set[int]], tails: list[tuple[int, set[int]]], recomputed: tuple[bool, ...] = ()
) -> int:
    """The rule itself: a hit of n blocks needs all before its end of some groups, and the last ones of others, and the
    next one of those whose last block is computed anew.
    """
    more = recomputed or (False,) * (len(whole) + len(tails))

    def allows(n: int, first: int, held: set[int], again: bool) -> bool:
        return n == 0 or (n + again <= len(keys) and held.issuperset(keys[first : n + again]))

    return max(
        n
        for n in range(len(keys) + 1)
        if all(allows(n, 0, held, again) for held, again in zip(whole, more, strict=False))
        and all(
            allows(n, max(0, n - need), held, again)
            for (need, held), again in zip(tails, more[len(whole) :], strict=True)
        )
    )


HELD = st.sets(st.integers(0, 9))


@given(
    st.lists(
        st.tuples(
            st.lists(HELD, max_size=2),
            st.lists(st.tuples(st.integers(1, 15), HELD), max_size=3),
            st.sampled_from(("no drafter", "drafter", "drafter beside states")),
        ),
        max_size=3,
    ),
    st.lists(st.integers(0, 9), max_size=14, unique=True),
)
def test_case_45_hits_of_several_groups_match_the_rule(caches, prompt):
    index, rules, expected = Index(), {}, {}
    for whole, tails, drafter in caches:
        held = [*whole, *(keys for _, keys in tails)]
        if not held:
            continue
        slots = [index.join() for _ in held]
        for slot, keys in zip(slots, held, strict=True):
            index.store(slot, keys)
        needs = [TailRule(need, 1 << slot) for (need, _), slot in zip(tails, slots[len(whole) :], strict=True)]
        states = [at for at, (need, _) in enumerate(tails, len(whole)) if need == 1 and drafter != "drafter"]
        more = tuple(drafter != "no drafter" and at not in states for at in range(len(held)))
        recomputed = mask_of(slot for slot, again in zip(slots, more, strict=True) if again)
        rules[slots[0]] = HitRule(mask_of(slots[: len(whole)]), tuple(needs), recomputed)
        expected[slots[0]] = longest_hit(prompt, whole, tails, more)
    assert index.match_groups(prompt, rules) == expected
    if rules:
        gone = next(iter(rules))
        index.retire(gone)
        assert gone not in index.match_groups(prompt, rules)


@given(st.integers(1, 5000), st.integers(1, 64))
def test_window_blocks_exclude_the_querying_token(window, size):
    need = window_blocks(window, size)
    assert need >= 1
    assert need * size >= window - 1
    assert need == 1 or (need - 1) * size < window - 1


def test_window_hits_after_evicted_blocks():
    index = Index()
    slot = index.join()
    index.store(slot, range(46, 78))
    assert index.match(range(78), [slot]) == {slot: 0}
    # The facts' example: window 1024, blocks of 32, 32 of 78 blocks held, and the repeat hit all of them.
    assert index.match_groups(range(78), {slot: alone(slot, window_blocks(1024, 32))}) == {slot: 78}
    index.remove(slot, [60])
    assert index.match_groups(range(78), {slot: alone(slot, window_blocks(1024, 32))}) == {slot: 0}


def test_retired_slot_is_reused_only_after_the_sweep():
    index = Index()
    old = index.join()
    index.store(old, range(100))
    index.retire(old)
    assert index.match([1, 2], [old]) == {}
    fresh = index.join()
    assert fresh != old
    while index.sweep(budget=10):
        pass
    assert len(index) == 0
    assert index.join() == old
    assert index.match([1, 2], [old]) == {old: 0}


@given(st.integers(0, 2**200))
def test_bits_lists_set_positions(mask):
    assert sum(1 << number for number in bits(mask)) == mask
