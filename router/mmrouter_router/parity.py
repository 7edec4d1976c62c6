"""Predicted against published blocks: where they first differ, and what that says about the cause. Pure."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmrouter.blocks import Span
from mmrouter.engines.events import Stored

Cause = Literal["no_events", "block_size", "salt", "truncation", "count", "template", "identity", "unknown"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference: its cause (a metric label) and a sentence for people."""

    cause: Cause
    message: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the router expects an engine to publish for one prompt."""

    ids: "array[int]"
    spans: tuple[Span, ...]
    block_size: int
    salt: str | None
    placeholder_id: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Published blocks that follow each other: tokens back to back, image starts relative to the run's own start."""

    ids: tuple[int, ...]
    images: tuple[tuple[int, bytes], ...]
    rooted: bool
    event: Stored


def first_difference(predicted: Prediction, published: Sequence[Stored]) -> Difference | None:
    """Return the first difference between a prediction and the events that followed its request, or ``None``.

    ``published`` may hold events of other requests too: the run of blocks that shares the longest beginning with the
    prediction is the one that is compared. Blocks that the engine already held are not published again, so a run may
    start at any block.
    """
    size = predicted.block_size
    if not published:
        return Difference("no_events", "the engine published no stored block for this request")
    sizes = {event.block_size for event in published}
    if size not in sizes:
        return Difference("block_size", f"predicted blocks of {size} tokens, the engine publishes {sorted(sizes)}")
    runs = [run for run in _runs(published) if run.event.block_size == size]
    run, start = max(
        ((run, start) for run in runs for start in _starts(predicted, run)),
        key=lambda pair: (_common(predicted.ids, pair[0].ids, pair[1]), -pair[1]),
    )
    if (run.event.salt or None) != (predicted.salt or None) and run.rooted:
        return Difference("salt", f"predicted salt {predicted.salt!r}, the engine used {run.event.salt!r}")
    complete = len(predicted.ids) // size * size
    same = _common(predicted.ids, run.ids, start)
    expected = complete - start
    if same < min(expected, len(run.ids)):
        return _token_difference(predicted, run, start, same)
    images = _images_difference(predicted, run, start)
    if images is not None:
        return images
    if len(run.ids) < expected:
        return Difference(
            "truncation",
            f"predicted {expected // size} new blocks, the engine published {len(run.ids) // size} of them",
        )
    return None


def _token_difference(predicted: Prediction, run: _Run, start: int, same: int) -> Difference:
    position = start + same
    want, got = predicted.ids[position], run.ids[same]
    where = f"token {position} (block {position // predicted.block_size})"
    if predicted.placeholder_id in (want, got):
        return Difference(
            "count", f"{where}: predicted id {want}, published {got}: an image takes another number of tokens"
        )
    return Difference("template", f"{where}: predicted id {want}, published {got}")


def _images_difference(predicted: Prediction, run: _Run, start: int) -> Difference | None:
    end = start + len(run.ids)
    want = [(s.offset, s.identity) for s in predicted.spans if s.offset < end and s.end > start]
    got = [(offset + start, identity) for offset, identity in run.images]
    for (want_at, want_id), (got_at, got_id) in zip(want, got, strict=False):
        if want_at != got_at:
            return Difference("count", f"image predicted at token {want_at}, published at {got_at}")
        if want_id != got_id:
            return Difference(
                "identity", f"image at token {want_at}: predicted {want_id.hex()[:12]}, published {got_id.hex()[:12]}"
            )
    if len(want) != len(got):
        return Difference("identity", f"predicted {len(want)} images in these blocks, published {len(got)}")
    return None


def _runs(published: Sequence[Stored]) -> list[_Run]:
    """Join events whose parent is the last block of an earlier one."""
    runs: list[list[Stored]] = []
    ends: dict[int, list[Stored]] = {}
    for event in published:
        if not event.hashes:
            continue
        chain = ends.pop(event.parent, None) if event.parent is not None else None
        if chain is None:
            chain = []
            runs.append(chain)
        chain.append(event)
        ends[event.hashes[-1]] = chain
    return [_join(chain) for chain in runs]


def _join(chain: Sequence[Stored]) -> _Run:
    ids: list[int] = []
    images: dict[int, bytes] = {}
    for event in chain:
        base = len(ids)
        for number, identity, relative in event.spans:
            images.setdefault(base + number * event.block_size + relative, identity)
        ids.extend(event.ids)
    return _Run(tuple(ids), tuple(sorted(images.items())), chain[0].parent is None, chain[0])


def _starts(predicted: Prediction, run: _Run) -> range:
    return range(0, 1) if run.rooted else range(0, max(1, len(predicted.ids)), predicted.block_size)


def _common(ids: "array[int]", published: Sequence[int], start: int) -> int:
    """Number of leading tokens of ``published`` that equal ``ids`` from ``start`` on."""
    limit = min(len(ids) - start, len(published))
    for number in range(limit):
        if ids[start + number] != published[number]:
            return number
    return max(limit, 0)
