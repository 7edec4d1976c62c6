"""A difference is named by its first cause."""

from array import array

import pytest
from msgspec.structs import replace

from mmrouter_lib.block_keys import Span, block_extras
from mmrouter_lib.engines.base.events import Stored
from mmrouter_router.explain.block_diff import Prediction, first_difference

PAD = 99
A, B = b"a" * 32, b"b" * 32


def prediction(ids=None, spans=((5, 6, A),), size=4, salt=None):
    ids = ids if ids is not None else [1, 2, 3, 4, 5, *[PAD] * 6, 7, 8, 9, 10, 11, 12]
    return Prediction(array("I", ids), tuple(Span(*s) for s in spans), size, salt, PAD)


def published(p: Prediction, *, start=0, blocks=None, size=None, salt=None):
    """The event that an engine would publish for a prompt that it understands as ``p``."""
    size = size or p.block_size
    count = blocks if blocks is not None else len(p.ids) // size - start
    spans = []
    for span in p.spans:
        for number in range(start, start + count):
            if span.offset < (number + 1) * size and span.end > number * size:
                spans.append((number - start, span.identity, span.offset - number * size))
    ids = p.ids[start * size : (start + count) * size]
    extras = block_extras(p.spans, size, start + count)
    return Stored(
        hashes=tuple(100 + start + n for n in range(count)),
        parent=None if start == 0 else 99 + start,
        ids=ids,
        block_size=size,
        extras={n - start: e for n, e in extras.items() if n >= start},
        spans=tuple(spans),
        lora=None,
        salt=salt,
        group=0,
        medium="GPU",
    )


def cause(p, *events):
    found = first_difference(p, events)
    return found.cause if found else None


def test_equal_streams_have_no_difference():
    p = prediction()
    assert cause(p, published(p)) is None
    first, rest = published(p, blocks=2), published(p, start=2)
    assert cause(p, first, rest) is None
    assert cause(p, rest) is None


def test_events_of_other_requests_are_ignored():
    p = prediction()
    other = replace(published(prediction(ids=[50 + i for i in range(17)], spans=())), hashes=(7, 8, 9, 10))
    assert cause(p, other, published(p)) is None


@pytest.mark.parametrize(
    ("expected", "engine"),
    [
        ("template", prediction(ids=[1, 2, 3, 40, 5, *[PAD] * 6, 7, 8, 9, 10, 11, 12])),
        ("count", prediction(ids=[1, 2, 3, 4, 5, *[PAD] * 7, 7, 8, 9, 10, 11, 12], spans=((5, 7, A),))),
        ("identity", prediction(spans=((5, 6, B),))),
        ("identity", prediction(spans=())),
    ],
)
def test_first_difference_names_its_cause(expected, engine):
    assert cause(prediction(), published(engine)) == expected


def test_block_size_salt_truncation_and_silence_are_distinct_causes():
    p = prediction()
    assert cause(p, published(p, size=8)) == "block_size"
    assert cause(p, published(p, salt="t1-x")) == "salt"
    assert cause(p, published(p, blocks=2)) == "truncation"
    assert cause(p) == "no_events"


def test_message_names_token_and_block():
    engine = prediction(ids=[1, 2, 3, 4, 5, *[PAD] * 6, 7, 80, 9, 10, 11, 12])
    found = first_difference(prediction(), [published(engine)])
    assert found is not None
    assert "token 12 (block 3): predicted id 8, published 80" in found.message
