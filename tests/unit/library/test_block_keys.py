"""Properties of block keys: inputs that change them and inputs that do not."""

from array import array

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mmrouter_lib import block_keys

pytestmark = pytest.mark.usefixtures("form")

KEY = bytes(range(32))
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=80).map(lambda v: array("I", v))
A, B = b"a" * 32, b"b" * 32


def keys(ids, spans=(), size=16, seed=1):
    return list(block_keys.block_keys(array("I", ids), size, [block_keys.Span(*s) for s in spans], seed))


def test_case_02_an_incomplete_tail_is_no_block():
    assert len(keys(range(69))) == 4
    assert keys(range(69)) == keys([*range(68), 1000])


def test_case_03_a_changed_block_changes_itself_and_everything_after_it():
    base = keys(range(96))
    first = keys([7, *range(1, 96)])
    third = keys([*range(48), 7, *range(49, 96)])
    assert all(a != b for a, b in zip(base, first, strict=True))
    assert base[:3] == third[:3]
    assert all(a != b for a, b in zip(base[3:], third[3:], strict=True))


def test_case_04_lora_namespace_and_their_absence_differ():
    def seed(**values):
        return block_keys.namespace_seed(KEY, model="m", **values)

    assert seed(lora="") == seed() == seed(lora=None, salt="")
    assert len({seed(), seed(lora="t"), seed(salt="t"), seed(lora="t", salt="t"), seed(revision="t")}) == 5


def test_case_05_salts_share_nothing():
    a, b = (block_keys.namespace_seed(KEY, model="m", salt=s) for s in "ab")
    assert not set(keys(range(96), seed=a)) & set(keys(range(96), seed=b))


def test_case_06_swapped_images_diverge_at_the_first_image_block():
    ids = list(range(64))
    one = keys(ids, [(20, 8, A), (40, 8, B)])
    two = keys(ids, [(20, 8, B), (40, 8, A)])
    assert one[0] == two[0]
    assert one[1] != two[1]


def test_case_07_the_same_image_twice_differs_from_two_at_the_second_only():
    ids = list(range(64))
    one = keys(ids, [(4, 8, A), (40, 8, A)])
    two = keys(ids, [(4, 8, A), (40, 8, B)])
    assert one[:2] == two[:2]
    assert one[2] != two[2]


def test_case_08_order_inside_one_block_matters():
    assert keys(range(16), [(1, 4, A), (8, 4, B)]) != keys(range(16), [(1, 4, B), (8, 4, A)])


def test_case_44_adjacent_images_in_one_block_keep_their_own_starts():
    extras = block_keys.block_extras([block_keys.Span(13, 12, A), block_keys.Span(25, 5, B)], 16, 2)
    assert extras == {0: block_keys.span_extra(A, 13), 1: block_keys.span_extra(A, -3) + block_keys.span_extra(B, 9)}


@given(IDS, st.integers(1, 20), st.integers(0, 2**64 - 1))
def test_a_chain_cut_anywhere_and_continued_equals_the_whole(ids, size, seed):
    whole = list(block_keys.block_keys(ids, size, [], seed))
    for cut in range(len(whole) + 1):
        head = list(block_keys.chain(ids[: cut * size], size, cut, {}, seed))
        rest = block_keys.chain(ids[cut * size :], size, len(whole) - cut, {}, head[-1] if head else seed)
        assert head + list(rest) == whole


@given(IDS, st.integers(1, 20), st.data())
def test_spans_and_events_see_the_same_extras(ids, size, data):
    """A prompt hashed from its spans equals the same blocks hashed from (block, identity, relative start) triples."""
    assume(len(ids) > 0)
    offset = data.draw(st.integers(0, len(ids) - 1))
    length = data.draw(st.integers(1, len(ids) - offset))
    span = block_keys.Span(offset, length, A)
    blocks = len(ids) // size
    extras = {
        number: block_keys.span_extra(A, offset - number * size)
        for number in range(blocks)
        if offset < (number + 1) * size and offset + length > number * size
    }
    assert list(block_keys.block_keys(ids, size, [span], 3)) == list(block_keys.chain(ids, size, blocks, extras, 3))


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_keys_are_eight_bytes_each_and_come_back(values):
    packed = block_keys.pack_keys(values)
    assert len(packed) == 8 * len(values)
    assert list(block_keys.unpack_keys(packed)) == values


def test_wide_ids_are_other_keys_than_narrow_ones_of_the_same_value():
    assert list(block_keys.block_keys(array("Q", range(32)), 16, [], 1)) != list(
        block_keys.block_keys(array("I", range(32)), 16, [], 1)
    )


def test_invalid_arguments_raise_value_error():
    with pytest.raises(ValueError, match="block size"):
        keys(range(32), size=0)
    with pytest.raises(ValueError, match="at least one token"):
        keys(range(32), [(3, 0, A)])
    with pytest.raises(ValueError, match="multiple of"):
        block_keys.unpack_keys(b"1234567")
