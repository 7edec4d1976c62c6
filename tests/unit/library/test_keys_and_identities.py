"""Block keys and media identities: inputs that change them and inputs that do not; the list of cases is complete."""

import io
import re
from array import array
from pathlib import Path

import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from unit.engines.sglang_pages import page_hashes

from mmrouter_lib import block_keys
from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.sglang.identity import run_ids, sentinels
from mmrouter_lib.media_identity import foreign_identity, from_wire, media_identity, to_wire

pytestmark = pytest.mark.usefixtures("form")

KEY = bytes(range(32))
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=80).map(lambda v: array("I", v))
A, B = b"a" * 32, b"b" * 32


def keys(ids, spans=(), size=16, seed=1):
    return list(block_keys.block_keys(array("I", ids), size, [Span(*s) for s in spans], seed))


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
    extras = block_keys.block_extras([Span(13, 12, A), Span(25, 5, B)], 16, 2)
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
    span = Span(offset, length, A)
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


prompts = st.tuples(IDS, st.integers(1, 9), st.integers(1, 3), st.lists(st.integers(0, 80), max_size=2, unique=True))


def with_images(ids, starts):
    return [Span(at, 1, identity) for at, identity in zip(sorted(starts), (A, B), strict=False) if at < len(ids)]


@given(prompts)
def test_a_key_with_a_lookahead_covers_the_next_tokens_and_the_images_that_start_there(prompt):
    ids, size, lookahead, starts = prompt
    spans = with_images(ids, starts)
    found = block_keys.block_keys(ids, size, spans, 1, lookahead)
    assert len(found) == max(0, len(ids) - lookahead) // size
    for number, key in enumerate(found):
        end = (number + 1) * size + lookahead
        covered = block_keys.block_keys(ids[:end], size, [span for span in spans if span.offset < end], 1, lookahead)
        assert covered[-1] == key
        changed = ids[: end - 1] + array("I", [ids[end - 1] ^ 1])
        other = block_keys.block_keys(changed, size, [span for span in spans if span.offset < end], 1, lookahead)
        assert (other[:-1], other[-1] == key) == (found[:number], False)
        elsewhere = [Span(end - 1, 1, b"c" * 32), *(span for span in spans if span.offset < end - 1)]
        assert block_keys.block_keys(ids[:end], size, elsewhere, 1, lookahead)[-1] != key


@given(prompts)
def test_keys_with_different_lookaheads_share_nothing(prompt):
    ids, size, _, starts = prompt
    forms = [block_keys.block_keys(ids, size, with_images(ids, starts), 1, lookahead) for lookahead in range(3)]
    assert len({key for form in forms for key in form}) == sum(map(len, forms))


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


ROOT = Path(__file__).parents[3]


def test_case_01_the_key_of_sixteen_tokens_is_xxh3_over_their_words_and_never_changes():
    ids = array("I", range(1, 17))
    words = b"".join(number.to_bytes(4, "little") for number in range(1, 17))
    (key,) = block_keys.block_keys(ids, 16, (), 0)
    assert key == xxhash.xxh3_64_intdigest(words, seed=0)
    # A change of this number is a change of the wire between sidecars and routers of two releases.
    assert f"{key:016x}" == "d2e217905d2bda1d"


def encoded(form: str, size: tuple[int, int] = (3, 2), pixels: bytes = bytes(range(18)), **options: object) -> bytes:
    out = io.BytesIO()
    Image.frombytes("RGB", size, pixels).save(out, form, **options)
    return out.getvalue()


def test_case_11_equal_pixels_in_two_encodings_are_two_identities():
    png, webp = encoded("PNG"), encoded("WEBP", lossless=True)
    with Image.open(io.BytesIO(png)) as one, Image.open(io.BytesIO(webp)) as two:
        assert one.convert("RGB").tobytes() == two.convert("RGB").tobytes()
    assert media_identity(png, {}, key=KEY) != media_identity(webp, {}, key=KEY)


def test_case_13_two_shapes_of_one_byte_stream_are_two_identities():
    wide, tall = encoded("BMP", (3, 2)), encoded("BMP", (2, 3))
    assert media_identity(wide, {}, key=KEY) != media_identity(tall, {}, key=KEY)


@pytest.mark.parametrize("bit", [30, 31, 62, 63, 64, 128, 255])
def test_case_15_identities_that_share_their_low_thirty_bits_share_no_block(bit: int):
    low = 0x2F3A_5C71 & (2**30 - 1)
    one, other = (number.to_bytes(32, "big") for number in (low, low | 1 << bit))
    ids = array("I", range(32))
    first, second = (block_keys.block_keys(ids, 16, [Span(4, 20, identity)], 1) for identity in (one, other))
    assert not set(first) & set(second)
    assert to_wire(one) != to_wire(other)


@pytest.mark.parametrize("bit", [30, 31, 61, 62, 63])
def test_case_15_item_hashes_that_share_their_low_thirty_bits_share_no_wide_sentinel(bit: int):
    low = 0x2F3A_5C71 & (2**30 - 1)
    one, other = (sentinels(number, legacy=False) for number in (low, low | 1 << bit))
    assert not set(one) & set(other)
    assert not set(page_hashes(run_ids(one, 16), 4)) & set(page_hashes(run_ids(other, 16), 4))
    # The older single value collides, so the form is chosen by release.
    assert sentinels(low, legacy=True) == sentinels(low | 1 << bit, legacy=True)


def proved() -> dict[int, set[str]]:
    """Case -> the test files that have it in a name."""
    files: dict[int, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"def (test_\w+)", path.read_text()):
            for number in re.findall(r"case_(\d+)(?=_|$)", name):
                files.setdefault(int(number), set()).add(str(path.relative_to(ROOT)))
    return files


def table() -> dict[int, str]:
    """Case -> its entry in docs/cases.md."""
    text = (ROOT / "docs" / "cases.md").read_text()
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    return {int(number): says.strip() for number, says in rows}


def test_every_case_of_the_list_is_a_test_or_has_a_reason():
    tests, listed = proved(), table()
    assert sorted(listed) == list(range(1, 51))
    for number, says in listed.items():
        if says.startswith("does not apply: "):
            assert len(says) > len("does not apply: ") + 10, number
        else:
            named = set(re.findall(r"`(tests/[\w/.]+\.py)`", says))
            assert named, f"case {number} names no test file"
            assert named <= tests.get(number, set()), f"case {number}: {named} of {tests.get(number)}"


def test_case_09_and_case_10_identity_follows_the_bytes_alone():
    assert media_identity(b"same", {}, key=KEY) == media_identity(b"same", {}, key=KEY)
    assert media_identity(b"same", {}, key=KEY) != media_identity(b"other", {}, key=KEY)


def test_bytes_that_are_an_image_and_a_video_have_an_identity_as_each():
    assert media_identity(b"GIF89a", {}, key=KEY) != media_identity(b"GIF89a", {}, key=KEY, modality="video")


def test_case_12_processor_options_are_part_of_the_identity():
    plain = media_identity(b"x", {}, key=KEY)
    limited = media_identity(b"x", {"max_pixels": 1000}, key=KEY)
    assert len({plain, limited, media_identity(b"x", {"min_pixels": 1000}, key=KEY)}) == 3


def test_deployments_do_not_share_identities():
    assert media_identity(b"x", {}, key=KEY) != media_identity(b"x", {}, key=bytes([1]) * 32)


@given(st.dictionaries(st.sampled_from(["min_pixels", "max_pixels", "num_crops"]), st.integers(), min_size=1))
def test_the_order_of_options_does_not_matter(options):
    backward = dict(reversed(options.items()))
    assert media_identity(b"x", options, key=KEY) == media_identity(b"x", backward, key=KEY)


def test_equal_values_of_different_types_are_different_options():
    values = (True, 1, "1", 1.0)
    assert len({media_identity(b"x", {"num_crops": v}, key=KEY) for v in values}) == 4


@given(st.binary(min_size=32, max_size=32))
def test_the_wire_form_comes_back_and_is_lower_hex(identity):
    text = to_wire(identity)
    assert text.startswith("m1-")
    assert text == text.lower()
    assert from_wire(text) == identity


@pytest.mark.parametrize("text", ["", "m1-", "m2-" + "0" * 64, "m1-" + "0" * 63, "m1-" + "A" * 64, "0" * 64])
def test_any_other_text_is_a_distinct_foreign_identity(text):
    assert from_wire(text) is None
    assert foreign_identity(text) != foreign_identity(text + "x")


def test_empty_media_wrong_keys_and_unknown_options_are_errors():
    with pytest.raises(ValueError, match="empty"):
        media_identity(b"", {}, key=KEY)
    with pytest.raises(ValueError, match="32 bytes"):
        media_identity(b"x", {}, key=b"short")
    with pytest.raises(ValueError, match="'sharpen'"):
        media_identity(b"x", {"sharpen": 1}, key=KEY)
    with pytest.raises(ValueError, match="32 bytes"):
        to_wire(b"short")
