"""A prompt with sentinels: equal where everything is known, unlike anything from the first unknown image on."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.engines.base.events import Stored
from mmrouter_lib.engines.sglang.identity import SENTINEL_BASE, page_hashes, sentinels
from mmrouter_router.sentinels import fill_sentinels, observe_sentinels

SIZE = 4
VALUES = {bytes([n]): sentinels(n, legacy=False) for n in range(4)}


def prompt(parts: list[int]) -> tuple["array[int]", tuple[Span, ...]]:
    """Even numbers are text tokens, odd ones images of as many tokens."""
    ids, spans = array("I"), []
    for part in parts:
        if part % 2:
            spans.append(Span(len(ids), part, bytes([part % 4])))
        ids.extend([part] * (part if part % 2 else 1))
    return ids, tuple(spans)


@given(st.lists(st.integers(0, 9), max_size=30), st.sets(st.integers(0, 3)))
def test_keys_are_unique_from_the_first_unknown_image(parts, known):
    ids, spans = prompt(parts)
    exact = fill_sentinels(ids, spans, VALUES.get)
    one, two = [fill_sentinels(ids, spans, lambda name: VALUES[name] if name[0] in known else None) for _ in range(2)]
    assert (exact.unknown, len(exact.ids)) == (None, len(ids))
    keys = [block_keys(filled.ids, SIZE, (), 1) for filled in (exact, one, two)]
    if one.unknown is None:
        assert keys[0] == keys[1] == keys[2]
        return
    first = spans[one.unknown].offset // SIZE
    assert one.unknown == next(n for n, span in enumerate(spans) if span.identity[0] not in known)
    assert keys[0][:first] == keys[1][:first] == keys[2][:first]
    rest = [set(k[first:]) for k in keys]
    assert not rest[1] & rest[2]
    assert not rest[0] & rest[1]


def test_sentinels_cycle_within_each_run():
    ids, spans = prompt([0, 7, 2, 5, 4])
    filled = fill_sentinels(ids, spans, VALUES.get).ids
    for span in spans:
        values = VALUES[span.identity]
        assert list(filled[span.offset : span.end]) == [values[n % 4] for n in range(span.length)]
    text = [n for n in range(len(ids)) if not any(s.offset <= n < s.end for s in spans)]
    assert [filled[n] for n in text] == [ids[n] for n in text]


def stored(ids: "array[int]", first: int, end: int) -> Stored:
    """Blocks ``first`` .. ``end`` - 1 of a prompt, as an engine publishes them."""
    names = page_hashes(ids, SIZE)
    part = ids[first * SIZE : end * SIZE]
    return Stored(
        tuple(names[first:end]), names[first - 1] if first else None, part, SIZE, {}, (), None, None, 0, "GPU"
    )


@given(st.integers(0, 3), st.integers(0, 9), st.integers(1, 9))
def test_image_is_observed_across_split_events(offset, cut, tokens):
    ids = array("I", [*range(10, 10 + 2 * SIZE + offset), *[1] * tokens, *range(50, 60)])
    span = Span(2 * SIZE + offset, tokens, b"\x01")
    mine = fill_sentinels(ids, [span], VALUES.get).ids
    foreign = array("Q", range(90, 90 + 2 * SIZE + offset)) + array("Q", VALUES[b"\x02"] * 3)
    end = len(mine) // SIZE
    cut = min(cut, end)
    published = [stored(foreign, 0, len(foreign) // SIZE), stored(mine, 0, cut), stored(mine, cut, end)]
    seen = observe_sentinels(ids, span, SIZE, [event for event in published if event.hashes])
    assert seen == VALUES[b"\x01"][: min(4, tokens)]
    assert observe_sentinels(ids, span, SIZE, [stored(foreign, 0, len(foreign) // SIZE)]) is None


def test_single_sentinel_differs_from_text():
    ids = array("I", [*range(10, 18), *[1] * 6, *range(50, 60)])
    span = Span(8, 6, b"x")
    single = array("Q", ids)
    single[8:14] = array("Q", [SENTINEL_BASE + 9] * 6)
    assert observe_sentinels(ids, span, SIZE, [stored(single, 0, 6)]) == (SENTINEL_BASE + 9,)
    assert observe_sentinels(ids, span, SIZE, [stored(array("Q", ids), 0, 6)]) is None
