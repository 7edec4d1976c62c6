"""First difference between predicted and published blocks, and its cause. Pure."""

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
"""Least share of tokens in common with a prompt for a published run to count as that prompt's."""


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

    ``published`` may contain other requests: the run of blocks with the longest common beginning is compared. Blocks
    that the engine already held are not published again, so a run may start at any block. Without ``alone`` this prompt
    may be missing, so a run with little in common gives the cause ``unknown``.
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
    if max(want, got) >= SENTINEL_BASE or predicted.placeholder_id in (want, got):
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
    begin = block * size
    wanted = tuple((s.offset - begin, s.identity) for s in predicted.spans if s.offset < begin + size and s.end > begin)
    number = (begin - start) // size
    return replace(
        difference,
        block=block,
        predicted=BlockView(tuple(predicted.ids[begin : begin + size]), wanted),
        published=BlockView(run.ids[begin - start : begin - start + size], run.blocks.get(number, ())),
    )


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


def _starts(predicted: Prediction, run: _Run) -> range:
    return range(0, 1) if run.rooted else range(0, max(1, len(predicted.ids)), predicted.block_size)


def _common(ids: "array[int]", published: Sequence[int], start: int) -> int:
    """Number of leading tokens of ``published`` that equal ``ids`` from ``start`` on."""
    limit = min(len(ids) - start, len(published))
    for number in range(limit):
        if ids[start + number] != published[number]:
            return number
    return max(limit, 0)
