"""First difference between the router's prediction of a prompt and a renderer's rendering of the request. Pure.

Unlike published blocks a rendering is the whole prompt, its incomplete last block included, with the place of every
image. So both are compared from the beginning, text and images in turn.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmrouter_lib.block_keys import Span
from mmrouter_lib.prompt import Prompter
from mmrouter_router.explain.block_diff import BlockView, Difference
from mmrouter_router.explain.parity_check import Result, side_json
from mmrouter_router.request.prepared import Prepared

BEFORE, AFTER = 8, 16
"""Tokens that are shown before and from the first difference."""


@dataclass(frozen=True, slots=True)
class PredictedPrompt:
    """A predicted prompt; if not ``whole``, it ends where an unresolved image starts."""

    ids: "array[int]"
    spans: tuple[Span, ...]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class RenderVerdict:
    """Result of comparing with a renderer: ``Unknown`` with its cause where it returned no prompt.

    ``tokens``: number compared. ``first_token``: where both sides' pieces of a difference begin.
    """

    result: Result
    tokens: int
    cause: str = ""
    message: str = ""
    first_token: int = 0
    predicted: BlockView | None = None
    rendered: BlockView | None = None
    placeholder_id: int = -1


def predicted_prompt(prepared: Prepared) -> PredictedPrompt | None:
    """Return the router's own prediction, up to the first unresolved image; ``None`` without one."""
    if prepared.exactness == "affinity" or prepared.rendered:
        return None
    resolved = {image.identity for image in prepared.images if image.resolved}
    stop = next((span.offset for span in prepared.spans if span.identity not in resolved), None)
    if stop is None:
        return PredictedPrompt(prepared.ids, prepared.spans) if prepared.ids else None
    before = tuple(span for span in prepared.spans if span.offset < stop)
    return PredictedPrompt(prepared.ids[:stop], before, whole=False) if stop else None


def compare_rendering(predicted: PredictedPrompt, ids: "array[int]", spans: Sequence[Span]) -> RenderVerdict:
    """Compare a prediction with a rendering's ids and spans, in prompt order."""
    size = len(predicted.ids)
    first_difference = _first_difference(predicted, ids, spans)
    if first_difference is None:
        return RenderVerdict("True", size)
    difference, position = first_difference
    begin = max(0, position - BEFORE)
    first = next(iter(predicted.spans or spans), None)
    pads = predicted.ids if predicted.spans else ids
    return RenderVerdict(
        "False",
        size,
        difference.cause,
        difference.message,
        begin,
        _piece(predicted.ids, predicted.spans, begin, position + AFTER),
        _piece(ids, spans, begin, position + AFTER),
        pads[first.offset] if first is not None else -1,
    )


def rendering_json(verdict: RenderVerdict, prompter: Prompter | None) -> dict[str, Any]:
    """Return a comparison as JSON values, with the differing piece of the prompt decoded."""
    shown: dict[str, Any] = {"result": verdict.result, "cause": verdict.cause, "tokens": verdict.tokens}
    if verdict.message:
        shown["message"] = verdict.message
    if verdict.predicted is not None and verdict.rendered is not None:
        shown["piece"] = {
            "first_token": verdict.first_token,
            "predicted": side_json(verdict.predicted, verdict.placeholder_id, prompter),
            "rendered": side_json(verdict.rendered, verdict.placeholder_id, prompter),
        }
    return shown


def _first_difference(
    predicted: PredictedPrompt, ids: "array[int]", spans: Sequence[Span]
) -> tuple[Difference, int] | None:
    """Return the first difference and its token. Everything before it is equal, so places agree."""
    ours, at = predicted.ids, 0
    for number, want in enumerate(predicted.spans):
        got = spans[number] if number < len(spans) else None
        difference = _tokens(at, ours, want.offset, ids, got.offset if got is not None else want.offset)
        if difference is not None:
            return difference
        if got is None:
            return Difference("identity", f"rendered no image at token {want.offset}"), want.offset
        difference = _image(number, want, got) or _tokens(want.offset, ours, want.end, ids, got.end)
        if difference is not None:
            return difference
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
        message = f"{where}: predicted {want.identity.hex()[:12]}, rendered {got.identity.hex()[:12]}"
        return Difference("identity", message), want.offset
    if want.length != got.length:
        message = f"{where}: predicted {want.length} tokens, rendered {got.length}"
        return Difference("count", message), want.offset + min(want.length, got.length)
    return None


def _tokens(
    begin: int, want: "array[int]", want_end: int, got: "array[int]", got_end: int
) -> tuple[Difference, int] | None:
    """Compare two runs of text tokens that begin at the same place."""
    ours, theirs = want[begin:want_end], got[begin:got_end]
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    same = next((n for n in range(shorter) if ours[n] != theirs[n]), shorter)
    position = begin + same
    message = f"token {position}: predicted {_token(want, position)}, rendered {_token(got, position)}"
    return Difference("template", message), position


def _token(ids: "array[int]", position: int) -> str:
    return f"id {ids[position]}" if position < len(ids) else "the end"


def _piece(ids: "array[int]", spans: Sequence[Span], begin: int, end: int) -> BlockView:
    images = tuple((s.offset - begin, s.identity) for s in spans if s.offset < end and s.end > begin)
    return BlockView(tuple(ids[begin:end]), images)
