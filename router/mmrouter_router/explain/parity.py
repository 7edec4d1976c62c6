"""Predicted against published blocks: where they first differ, and what that says about the cause. Pure."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.base.events import Stored
from mmrouter_lib.engines.sglang.identity import SENTINEL_BASE

Cause = Literal["no_events", "block_size", "salt", "truncation", "count", "template", "identity", "unknown"]

ALIKE = 0.6
"""Share of tokens that a published run must have in common with a prompt to be taken for the engine's view of it."""


@dataclass(frozen=True, slots=True)
class Side:
    """One block as one side has it: its tokens, and where images start relative to it."""

    ids: tuple[int, ...]
    images: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference: its cause (a metric label), a sentence for people, and the block as both sides have it."""

    cause: Cause
    message: str
    block: int | None = None
    predicted: Side | None = None
    published: Side | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the router expects an engine to publish for one prompt.

    ``ids`` are the engine's own: with sentinels, and then without ``spans``, where it puts identity into them.
    """

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
    blocks: dict[int, tuple[tuple[int, bytes], ...]]  # block number -> images that overlap it, relative to the block
    rooted: bool
    event: Stored


def first_difference(predicted: Prediction, published: Sequence[Stored], *, alone: bool = True) -> Difference | None:
    """Return the first difference between a prediction and the events that followed its request, or ``None``.

    ``published`` may hold events of other requests too: the run of blocks that shares the longest beginning with the
    prediction is the one that is compared. Blocks that the engine already held are not published again, so a run may
    start at any block. Without ``alone`` other prompts may be the only ones there, so a run that has little in common
    with this one is not taken for the engine's view of it: the cause is then ``unknown``.
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
        return Difference(
            "truncation",
            f"predicted {expected // size} new blocks, the engine published {len(run.ids) // size} of them",
        )
    return None


def _token_difference(predicted: Prediction, run: _Run, start: int, same: int) -> Difference:
    position = start + same
    want, got = predicted.ids[position], run.ids[same]
    where = f"token {position} (block {position // predicted.block_size})"
    if want >= SENTINEL_BASE and got >= SENTINEL_BASE:
        return Difference("identity", f"{where}: predicted sentinel {want}, published {got}")
    if max(want, got) >= SENTINEL_BASE:
        return Difference(
            "count", f"{where}: predicted id {want}, published {got}: an image takes another number of tokens"
        )
    if predicted.placeholder_id in (want, got):
        return Difference(
            "count", f"{where}: predicted id {want}, published {got}: an image takes another number of tokens"
        )
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
            said = f"image at token {want_at}: predicted {want_id.hex()[:12]}, published {got_id.hex()[:12]}"
            return Difference("identity", said), want_at
    if len(want) != len(got):
        first = min(want[len(got) :] + got[len(want) :])[0]
        return Difference("identity", f"predicted {len(want)} images in these blocks, published {len(got)}"), first
    return None


def _shown(difference: Difference, predicted: Prediction, run: _Run, start: int, position: int) -> Difference:
    """Add the block that holds ``position`` as both sides have it; an image may have begun before the run did."""
    size = predicted.block_size
    block = max(position, start) // size
    begin = block * size
    wanted = tuple((s.offset - begin, s.identity) for s in predicted.spans if s.offset < begin + size and s.end > begin)
    number = (begin - start) // size
    return replace(
        difference,
        block=block,
        predicted=Side(tuple(predicted.ids[begin : begin + size]), wanted),
        published=Side(run.ids[begin - start : begin - start + size], run.blocks.get(number, ())),
    )


def _alike(predicted: Prediction, run: _Run, start: int) -> bool:
    """Whether most of the shorter one's tokens occur in the other, wherever they stand."""
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
    blocks: dict[int, tuple[tuple[int, bytes], ...]] = {}
    for event in chain:
        base = len(ids)
        for number, identity, relative in event.spans:
            images.setdefault(base + number * event.block_size + relative, identity)
            at = base // event.block_size + number
            blocks[at] = (*blocks.get(at, ()), (relative, identity))
        ids.extend(event.ids)
    return _Run(tuple(ids), tuple(sorted(images.items())), blocks, chain[0].parent is None, chain[0])


def _starts(predicted: Prediction, run: _Run) -> range:
    return range(0, 1) if run.rooted else range(0, max(1, len(predicted.ids)), predicted.block_size)


def _common(ids: "array[int]", published: Sequence[int], start: int) -> int:
    """Number of leading tokens of ``published`` that equal ``ids`` from ``start`` on."""
    limit = min(len(ids) - start, len(published))
    for number in range(limit):
        if ids[start + number] != published[number]:
            return number
    return max(limit, 0)
