"""The index answers exactly what sets of keys per candidate would answer."""

from hypothesis import given
from hypothesis import strategies as st

from mmrouter_router.index import Index, bits

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
def test_index_equals_one_set_per_candidate_through_any_history(steps, prompt):
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


def test_an_overlap_ends_at_the_first_missing_block_even_if_later_ones_are_held():
    index = Index()
    slot = index.join()
    index.store(slot, [1, 2, 4, 5])
    assert index.match([1, 2, 3, 4, 5], [slot]) == {slot: 2}


def test_a_retired_candidate_matches_nothing_at_once_and_its_slot_is_reused_only_after_the_sweep():
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


def test_two_hundred_candidates_need_no_more_than_one_entry_per_key():
    index = Index()
    slots = [index.join() for _ in range(200)]
    for slot in slots:
        index.store(slot, range(10))
    assert len(index) == 10
    assert index.match(list(range(10)), slots) == dict.fromkeys(slots, 10)


@given(st.integers(0, 2**200))
def test_bits_are_the_positions_that_are_set(mask):
    assert sum(1 << number for number in bits(mask)) == mask
