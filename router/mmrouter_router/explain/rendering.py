"""Our own prediction of a prompt against a renderer's rendering of the same request: where they first differ. Pure.

Unlike published blocks a rendering is the whole prompt, its incomplete last block included, with the place of every
image, so what differs needs no search: both are walked from the beginning, text and images in turn.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmrouter_lib.block_keys import Span
from mmrouter_lib.prompt import Prompter
from mmrouter_router.explain.evidence import Result, side_json
from mmrouter_router.explain.parity import Difference, Side
from mmrouter_router.request.prepare import Prepared

BEFORE, AFTER = 8, 16
"""Tokens that are shown before and from the first difference."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a prompt, all of it where ``whole``; else it ends where an image starts."""

    ids: "array[int]"
    spans: tuple[Span, ...]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Rendering:
    """What came of asking a renderer: ``Unknown`` with its cause where it gave no prompt.

    ``tokens`` were compared; of a difference, ``first_token`` is where both sides' pieces begin.
    """

    result: Result
    tokens: int
    cause: str = ""
    message: str = ""
    first_token: int = 0
    predicted: Side | None = None
    rendered: Side | None = None
    placeholder_id: int = -1


def predicted_prompt(prepared: Prepared) -> Prompt | None:
    """Return what we predicted of a request by ourselves, up to its first unresolved image; ``None`` for nothing."""
    if prepared.exactness == "affinity" or prepared.rendered:
        return None
    known = {image.identity for image in prepared.images if image.resolved}
    stop = next((span.offset for span in prepared.spans if span.identity not in known), None)
    if stop is None:
        return Prompt(prepared.ids, prepared.spans) if prepared.ids else None
    before = tuple(span for span in prepared.spans if span.offset < stop)
    return Prompt(prepared.ids[:stop], before, whole=False) if stop else None


def compare(predicted: Prompt, ids: "array[int]", spans: Sequence[Span]) -> Rendering:
    """Compare a prediction with a rendering's ids and spans, in prompt order; the first difference counts."""
    size = len(predicted.ids)
    found = _first_difference(predicted, ids, spans)
    if found is None:
        return Rendering("True", size)
    difference, position = found
    begin = max(0, position - BEFORE)
    first = next(iter(predicted.spans or spans), None)
    pads = predicted.ids if predicted.spans else ids
    return Rendering(
        "False",
        size,
        difference.cause,
        difference.message,
        begin,
        _piece(predicted.ids, predicted.spans, begin, position + AFTER),
        _piece(ids, spans, begin, position + AFTER),
        pads[first.offset] if first is not None else -1,
    )


def rendering_json(found: Rendering, prompter: Prompter | None) -> dict[str, Any]:
    """A comparison as plain values, the piece of the prompt that differs decoded."""
    shown: dict[str, Any] = {"result": found.result, "cause": found.cause, "tokens": found.tokens}
    if found.message:
        shown["message"] = found.message
    if found.predicted is not None and found.rendered is not None:
        shown["piece"] = {
            "first_token": found.first_token,
            "predicted": side_json(found.predicted, found.placeholder_id, prompter),
            "rendered": side_json(found.rendered, found.placeholder_id, prompter),
        }
    return shown


def _first_difference(predicted: Prompt, ids: "array[int]", spans: Sequence[Span]) -> tuple[Difference, int] | None:
    """Return the first difference and the token at which it shows. What is before it is equal, so places agree."""
    ours, at = predicted.ids, 0
    for number, want in enumerate(predicted.spans):
        got = spans[number] if number < len(spans) else None
        found = _tokens(at, ours, want.offset, ids, got.offset if got is not None else want.offset)
        if found is not None:
            return found
        if got is None:
            return Difference("identity", f"rendered no image at token {want.offset}"), want.offset
        found = _image(number, want, got) or _tokens(want.offset, ours, want.end, ids, got.end)
        if found is not None:
            return found
        at = want.end
    more = spans[len(predicted.spans)] if len(spans) > len(predicted.spans) else None
    if predicted.whole and more is None:
        return _tokens(at, ours, len(ours), ids, len(ids))
    if predicted.whole and more is not None:
        unexpected = Difference("identity", f"rendered an image at token {more.offset}"), more.offset
        return _tokens(at, ours, more.offset, ids, more.offset) or unexpected
    if more is None:
        missing = Difference("identity", f"rendered no image at token {len(ours)}"), len(ours)
        return _tokens(at, ours, len(ours), ids, len(ours)) or missing
    return _tokens(at, ours, len(ours), ids, more.offset)


def _image(number: int, want: Span, got: Span) -> tuple[Difference, int] | None:
    where = f"image {number + 1} at token {want.offset}"
    if want.identity != got.identity:
        said = f"{where}: predicted {want.identity.hex()[:12]}, rendered {got.identity.hex()[:12]}"
        return Difference("identity", said), want.offset
    if want.length != got.length:
        said = f"{where}: predicted {want.length} tokens, rendered {got.length}"
        return Difference("count", said), want.offset + min(want.length, got.length)
    return None


def _tokens(
    begin: int, want: "array[int]", want_end: int, got: "array[int]", got_end: int
) -> tuple[Difference, int] | None:
    """Compare two runs of tokens that begin at one place and that no image's place divides."""
    ours, theirs = want[begin:want_end], got[begin:got_end]
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    same = next((n for n in range(shorter) if ours[n] != theirs[n]), shorter)
    position = begin + same
    one = f"predicted {_token(want, position)}"
    return Difference("template", f"token {position}: {one}, rendered {_token(got, position)}"), position


def _token(ids: "array[int]", position: int) -> str:
    return f"id {ids[position]}" if position < len(ids) else "the end"


def _piece(ids: "array[int]", spans: Sequence[Span], begin: int, end: int) -> Side:
    images = tuple((s.offset - begin, s.identity) for s in spans if s.offset < end and s.end > begin)
    return Side(tuple(ids[begin:end]), images)
