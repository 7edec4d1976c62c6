"""First difference between a predicted prompt and what an engine published, or a renderer rendered. Pure.

Unlike published blocks a rendering is the whole prompt, its incomplete last block included, with the place of every
image. So these two are compared from the beginning, text and images in turn.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.base.events import Stored
from mmrouter_lib.engines.sglang.identity import SENTINEL_BASE
from mmrouter_lib.media_identity import to_wire
from mmrouter_lib.prompt import AnyPrompter
from mmrouter_router.request.prepared import Prepared

Result = Literal["True", "False", "Unknown"]
Cause = Literal["no_events", "block_size", "salt", "truncation", "count", "template", "identity", "unknown"]

ALIKE = 0.6  # least share of tokens in common with a prompt for a published run to count as that prompt's
BEFORE, AFTER = 8, 16  # tokens that are shown before and from the first difference


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block of one side: its tokens, and image starts relative to it."""

    ids: tuple[int, ...]
    images: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference: its cause (a metric label), a sentence for people, and both sides' block."""

    cause: Cause
    message: str
    block: int | None = None
    predicted: BlockView | None = None
    published: BlockView | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """Blocks that an engine should publish for one prompt.

    Where the engine writes sentinels, ``ids`` contain them and ``spans`` is empty.
    """

    ids: "array[int]"
    spans: tuple[Span, ...]
    block_size: int
    salt: str | None
    placeholder_id: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive published blocks: their tokens, and image starts relative to the run's start."""

    ids: tuple[int, ...]
    images: tuple[tuple[int, bytes], ...]
    blocks: dict[int, tuple[tuple[int, bytes], ...]]  # block number -> images that overlap it, relative to the block
    rooted: bool
    event: Stored


def first_difference(predicted: Prediction, published: Sequence[Stored], *, alone: bool = True) -> Difference | None:
    """Return the first difference between a prediction and the events that followed its request, or ``None``.

    ``published`` may contain other requests: the run of blocks with the longest common beginning is compared. Held
    blocks are not published again, so a run may start at any block. Without ``alone`` this prompt may be missing, so a
    run with little in common gives the cause ``unknown``.
    """
    size = predicted.block_size
    if not published:
        return Difference("no_events", "the engine published no stored block for this request")
    sizes = {event.block_size for event in published}
    if size not in sizes:
        return Difference("block_size", f"predicted blocks of {size} tokens, the engine publishes {sorted(sizes)}")
    runs = [run for run in _runs(published) if run.event.block_size == size]
    starts: dict[int, list[int]] = {}  # first id of a block -> where such blocks begin
    for at in range(0, len(predicted.ids), size):
        starts.setdefault(predicted.ids[at], []).append(at)
    run, start = max(
        (
            (run, start)
            for run in runs
            for start in ((0,) if run.rooted or not run.ids else starts.get(run.ids[0], (0,)))
        ),
        key=lambda pair: (_common(predicted.ids, pair[0].ids, pair[1]), -pair[1]),
    )
    if not alone and not _alike(predicted, run, start):
        return Difference("unknown", "none of the blocks that the engine published since resembles this prompt")
    if (run.event.salt or None) != (predicted.salt or None) and run.rooted:
        return Difference("salt", f"predicted salt {predicted.salt!r}, the engine used {run.event.salt!r}")
    complete = len(predicted.ids) // size * size
    same = _common(predicted.ids, run.ids, start)
    expected = complete - start
    if same < min(expected, len(run.ids)):
        return _shown(_token_difference(predicted, run, start, same), predicted, run, start, start + same)
    images = _images_difference(predicted, run, start)
    if images is not None:
        difference, position = images
        return _shown(difference, predicted, run, start, position)
    if len(run.ids) < expected:
        found = len(run.ids) // size
        return Difference(
            "truncation", f"predicted {expected // size} new blocks, the engine published {found} of them"
        )
    return None


def _token_difference(predicted: Prediction, run: _Run, start: int, same: int) -> Difference:
    position = start + same
    want, got = predicted.ids[position], run.ids[same]
    where = f"token {position} (block {position // predicted.block_size})"
    if want >= SENTINEL_BASE and got >= SENTINEL_BASE:
        return Difference("identity", f"{where}: predicted sentinel {want}, published {got}")
    if max(want, got) >= SENTINEL_BASE or predicted.placeholder_id in (want, got):
        why = "an image takes another number of tokens"
        return Difference("count", f"{where}: predicted id {want}, published {got}: {why}")
    return Difference("template", f"{where}: predicted id {want}, published {got}")


def _images_difference(predicted: Prediction, run: _Run, start: int) -> tuple[Difference, int] | None:
    """Return the first difference and the token at which it shows."""
    end = start + len(run.ids)
    want = [(s.offset, s.identity) for s in predicted.spans if s.offset < end and s.end > start]
    got = [(offset + start, identity) for offset, identity in run.images]
    for (want_at, want_id), (got_at, got_id) in zip(want, got, strict=False):
        if want_at != got_at:
            return Difference("count", f"image predicted at token {want_at}, published at {got_at}"), want_at
        if want_id != got_id:
            message = f"image at token {want_at}: predicted {want_id.hex()[:12]}, published {got_id.hex()[:12]}"
            return Difference("identity", message), want_at
    if len(want) != len(got):
        first = min(want[len(got) :] + got[len(want) :])[0]
        return Difference("identity", f"predicted {len(want)} images in these blocks, published {len(got)}"), first
    return None


def _shown(difference: Difference, predicted: Prediction, run: _Run, start: int, position: int) -> Difference:
    """Add both sides' block at ``position``; an image may begin before the run."""
    size = predicted.block_size
    block = max(position, start) // size
    begin, at = block * size, block * size - start
    ours = _piece(predicted.ids, predicted.spans, begin, begin + size)
    theirs = BlockView(run.ids[at : at + size], run.blocks.get(at // size, ()))
    return replace(difference, block=block, predicted=ours, published=theirs)


def _alike(predicted: Prediction, run: _Run, start: int) -> bool:
    """Whether the shorter side shares :data:`ALIKE` of its tokens with the other, in any order."""
    wanted = Counter(predicted.ids[start:])
    common = sum((wanted & Counter(run.ids)).values())
    return common >= ALIKE * min(len(run.ids), len(predicted.ids) - start)


def _runs(published: Sequence[Stored]) -> list[_Run]:
    """Join events whose parent is the last block of an earlier one."""
    runs: list[list[Stored]] = []
    ends: dict[int, list[Stored]] = {}
    for event in published:
        if not event.hashes:
            continue
        run = ends.pop(event.parent, None) if event.parent is not None else None
        if run is None:
            run = []
            runs.append(run)
        run.append(event)
        ends[event.hashes[-1]] = run
    return [_join(run) for run in runs]


def _join(events: Sequence[Stored]) -> _Run:
    ids: list[int] = []
    images: dict[int, bytes] = {}
    blocks: dict[int, tuple[tuple[int, bytes], ...]] = {}
    for event in events:
        base = len(ids)
        for number, identity, relative in event.spans:
            images.setdefault(base + number * event.block_size + relative, identity)
            at = base // event.block_size + number
            blocks[at] = (*blocks.get(at, ()), (relative, identity))
        ids.extend(event.ids)
    return _Run(tuple(ids), tuple(sorted(images.items())), blocks, events[0].parent is None, events[0])


def _common(ids: "array[int]", published: Sequence[int], start: int) -> int:
    """Number of leading tokens of ``published`` that equal ``ids`` from ``start`` on."""
    limit = max(0, min(len(ids) - start, len(published)))
    return next((number for number in range(limit) if ids[start + number] != published[number]), limit)


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
    resolved = {image.name for image in prepared.images if image.resolved}
    spans = tuple(sorted(prepared.spans, key=lambda span: span.offset))  # videos may stand before images
    stop = next((span.offset for span in spans if span.identity not in resolved), None)
    if stop is None:
        return PredictedPrompt(prepared.ids, spans) if prepared.ids else None
    before = tuple(span for span in spans if span.offset < stop)
    return PredictedPrompt(prepared.ids[:stop], before, whole=False) if stop else None


def compare_rendering(predicted: PredictedPrompt, ids: "array[int]", spans: Sequence[Span]) -> RenderVerdict:
    """Compare a prediction with a rendering's ids and spans, in prompt order."""
    size = len(predicted.ids)
    found = _first_difference(predicted, ids, spans)
    if found is None:
        return RenderVerdict("True", size)
    difference, position = found
    begin, end = max(0, position - BEFORE), position + AFTER
    first = next(iter(predicted.spans or spans), None)
    pads = predicted.ids if predicted.spans else ids
    pieces = _piece(predicted.ids, predicted.spans, begin, end), _piece(ids, spans, begin, end)
    placeholder = pads[first.offset] if first is not None else -1
    return RenderVerdict("False", size, difference.cause, difference.message, begin, *pieces, placeholder)


def rendering_json(verdict: RenderVerdict, prompter: AnyPrompter | None) -> dict[str, Any]:
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
    ours, theirs = want[begin:want_end], got[begin:got_end]
    if ours == theirs:
        return None
    position = begin + _common(ours, theirs, 0)
    message = f"token {position}: predicted {_token(want, position)}, rendered {_token(got, position)}"
    return Difference("template", message), position


def _token(ids: "array[int]", position: int) -> str:
    return f"id {ids[position]}" if position < len(ids) else "the end"


def _piece(ids: "array[int]", spans: Sequence[Span], begin: int, end: int) -> BlockView:
    images = tuple((s.offset - begin, s.identity) for s in spans if s.offset < end and s.end > begin)
    return BlockView(tuple(ids[begin:end]), images)


def side_json(side: BlockView, placeholder_id: int, prompter: AnyPrompter | None) -> dict[str, Any]:
    """Return one side's piece of a prompt as JSON values, decoded."""
    images = [{"identity": to_wire(identity), "starts_at": start} for start, identity in side.images]
    return {"text": _text(side.ids, placeholder_id, prompter), "tokens": list(side.ids), "images": images}


def _text(ids: Sequence[int], placeholder: int, prompter: AnyPrompter | None) -> str:
    """Decode token ids; a run of image tokens becomes one note."""
    pieces: list[str] = []
    for is_image, group in groupby(ids, lambda token: token == placeholder or token >= SENTINEL_BASE):
        run = list(group)
        if is_image:
            pieces.append(f"[{len(run)} image tokens]")
        else:
            pieces.append(str(run) if prompter is None else prompter.decode(run))
    return "".join(pieces)
