"""A media identity covers content and pixel options, and is keyed per deployment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.media_identity import foreign_identity, from_wire, media_identity, to_wire

KEY, OTHER = bytes(32), bytes([1]) * 32


def test_case_09_and_case_10_identity_follows_the_bytes_alone():
    assert media_identity(b"same", {}, key=KEY) == media_identity(b"same", {}, key=KEY)
    assert media_identity(b"same", {}, key=KEY) != media_identity(b"other", {}, key=KEY)


def test_case_12_processor_options_are_part_of_the_identity():
    plain = media_identity(b"x", {}, key=KEY)
    limited = media_identity(b"x", {"max_pixels": 1000}, key=KEY)
    assert len({plain, limited, media_identity(b"x", {"min_pixels": 1000}, key=KEY)}) == 3


def test_deployments_do_not_share_identities():
    assert media_identity(b"x", {}, key=KEY) != media_identity(b"x", {}, key=OTHER)


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
