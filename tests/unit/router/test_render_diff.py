"""Our own prompts against renderings: whatever is changed is named as what it is, at the place where it shows."""

from array import array

from hypothesis import assume, given
from hypothesis import strategies as st

from mmrouter_lib.block_keys import Span
from mmrouter_router.explain.parity_check import Result
from mmrouter_router.explain.render_diff import (
    AFTER,
    BEFORE,
    PredictedPrompt,
    RenderVerdict,
    compare_rendering,
    predicted_prompt,
    rendering_json,
)
from mmrouter_router.request.prepared import Prepared

PAD = 99
OTHER = b"o" * 32
texts = st.lists(st.integers(1, 60), max_size=12)
lengths = st.integers(1, 30)


def build(pieces) -> tuple["array[int]", tuple[Span, ...]]:
    """Ids and spans of texts (lists of tokens) and images (identity, tokens), in any order."""
    ids, spans = array("I"), []
    for piece in pieces:
        if isinstance(piece, list):
            ids.extend(piece)
        else:
            spans.append(Span(len(ids), piece[1], piece[0]))
            ids.extend([PAD] * piece[1])
    return ids, tuple(spans)


@st.composite
def prompts(draw) -> list:
    """Text, image, text ... with at least one image; texts may be empty, so images may touch."""
    pieces = [draw(texts)]
    for number in range(draw(st.integers(1, 4))):
        pieces += [(bytes([number]) * 32, draw(lengths)), draw(texts)]
    return pieces


def judged(ours, theirs, *, whole: bool = True) -> RenderVerdict:
    return compare_rendering(PredictedPrompt(*build(ours), whole=whole), *build(theirs))


def outcome(found: RenderVerdict) -> tuple[Result, str]:
    return found.result, found.cause


@given(prompts())
def test_equal_prompts_have_no_difference(pieces):
    found = judged(pieces, pieces)
    assert outcome(found) == ("True", "")
    assert found.tokens == len(build(pieces)[0])


@given(prompts(), st.data())
def test_text_difference_has_cause_template(pieces, data):
    where = data.draw(st.sampled_from(range(0, len(pieces), 2)))
    change = data.draw(st.sampled_from(["replaced", "added", "gone"]))
    text = list(pieces[where])
    assume(text or change == "added")
    at = data.draw(st.integers(0, len(text) - (change != "added")))
    text[at : at + (change != "added")] = [] if change == "gone" else [61]
    changed = [*pieces[:where], text, *pieces[where + 1 :]]
    for ours, theirs in ((pieces, changed), (changed, pieces)):
        found = judged(ours, theirs)
        assert outcome(found) == ("False", "template")
        same = next((n for n, (a, b) in enumerate(zip(build(ours)[0], build(theirs)[0], strict=False)) if a != b), None)
        if same is not None:
            assert f"token {same}:" in found.message
            assert found.first_token == max(0, same - BEFORE)


@given(prompts(), st.data())
def test_image_length_difference_has_cause_count(pieces, data):
    where = data.draw(st.sampled_from(range(1, len(pieces), 2)))
    identity, length = pieces[where]
    longer = [*pieces[:where], (identity, length + data.draw(lengths)), *pieces[where + 1 :]]
    for ours, theirs in ((pieces, longer), (longer, pieces)):
        found = judged(ours, theirs)
        assert outcome(found) == ("False", "count")
        assert f"image {where // 2 + 1} " in found.message


@given(prompts(), st.data())
def test_other_image_has_cause_identity(pieces, data):
    where = data.draw(st.sampled_from(range(1, len(pieces), 2)))
    changed = [*pieces[:where], (OTHER, data.draw(lengths)), *pieces[where + 1 :]]
    assert outcome(judged(pieces, changed)) == ("False", "identity")


@given(prompts())
def test_missing_or_extra_image_has_cause_identity(pieces):
    more = [*pieces, (OTHER, 3)]
    assert outcome(judged(pieces, more)) == ("False", "identity")
    assert outcome(judged(more, pieces)) == ("False", "identity")


def test_first_of_several_differences_counts():
    ours = [[1, 2], (b"a" * 32, 4), [3, 4], (b"b" * 32, 4), [5]]
    assert judged(ours, [[1, 2], (b"a" * 32, 5), [3, 7], (OTHER, 4), [5]]).cause == "count"
    assert judged(ours, [[1, 2], (b"a" * 32, 4), [3, 7], (OTHER, 4), [5]]).cause == "template"
    assert judged(ours, [[1, 2], (b"b" * 32, 4), [3, 4], (b"a" * 32, 4), [5]]).cause == "identity"


@given(prompts(), st.data())
def test_partial_prompt_is_compared_before_its_image(pieces, data):
    where = data.draw(st.sampled_from(range(1, len(pieces), 2)))
    known = pieces[:where]
    assert outcome(judged(known, [*known, (OTHER, data.draw(lengths)), data.draw(texts)], whole=False)) == ("True", "")
    text = judged(known, [*known, [61], (OTHER, 3)], whole=False)
    assert outcome(text) == ("False", "template")
    assert judged(known, known, whole=False).cause == "identity"


def test_both_sides_of_a_difference_are_shown():
    head = list(range(1, 41))
    found = judged([head, (b"a" * 32, 6), [50]], [head, (b"a" * 32, 9), [50]])
    shown = rendering_json(found, None)
    assert (shown["result"], shown["cause"], shown["tokens"]) == ("False", "count", 47)
    piece = shown["piece"]
    assert piece["first_token"] == 46 - BEFORE
    assert piece["predicted"]["tokens"] == [39, 40, *[PAD] * 6, 50]
    assert piece["rendered"]["tokens"] == [39, 40, *[PAD] * 9, 50]
    assert piece["rendered"]["text"] == "[39, 40][9 image tokens][50]"
    assert piece["rendered"]["images"][0]["starts_at"] == 2
    long = judged([head], [[7, *head]])
    assert len(long.predicted.ids) == len(long.rendered.ids) == AFTER


class Image:
    def __init__(self, identity: bytes, *, resolved: bool) -> None:
        self.identity, self.resolved = identity, resolved


def prepared(pieces, exactness="exact", *, resolved=True, rendered=False) -> Prepared:
    ids, spans = build(pieces)
    images = tuple(Image(span.identity, resolved=resolved) for span in spans)
    return Prepared(None, None, images, ids, spans, exactness, (), 1, 1, rendered=rendered)


def test_only_own_predictions_are_compared():
    pieces = [[1, 2], (b"a" * 32, 4), [3]]
    ids, spans = build(pieces)
    assert predicted_prompt(prepared(pieces)) == PredictedPrompt(ids, spans)
    assert predicted_prompt(prepared(pieces, "partial", resolved=False)) == PredictedPrompt(ids[:2], (), whole=False)
    assert predicted_prompt(prepared(pieces[1:], "partial", resolved=False)) is None
    assert predicted_prompt(prepared([], "affinity")) is None
    assert predicted_prompt(prepared(pieces, rendered=True)) is None
