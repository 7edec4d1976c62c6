"""What a kept decision predicted, and what the chosen engine holds and published of it (docs/exactness.md).

Questions go to the worker's sidecar only: neither the client's request nor its stream is touched, and nothing is asked
of the engine.
"""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmrouter_lib import feed
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.events import EventError, Ragged, Stored
from mmrouter_lib.engines.sglang.identity import SENTINEL_BASE
from mmrouter_lib.media_identity import to_wire
from mmrouter_lib.prompt import Prompter
from mmrouter_router.explain.parity import Difference, Prediction, Side, first_difference
from mmrouter_router.fleet.feed_client import Feed, FeedSilentError
from mmrouter_router.fleet.index import window_blocks
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.request.prepare import Prepared

Result = Literal["True", "False", "Unknown"]
CHECK_SECONDS = 0.02
"""A busy engine's deltas come by the hundred; looking after every one of them would cost more than it tells."""
MAX_DETAIL = 4096
"""Deltas whose raw batches are asked for at most."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What one decision expects of its engine: ``keys`` to be held, as part of the prompt of the prediction.

    ``epoch`` and ``seq`` say how far that worker's feed was when the decision was made.
    """

    worker: str  # pod uid
    rank: int
    epoch: int
    seq: int
    keys: "array[int]"
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the engine holds what was predicted; ``Unknown`` where that can no longer be told, and why."""

    result: Result
    blocks: int
    difference: Difference | None = None

    @property
    def cause(self) -> str:
        """The cause as a metric label: one of few."""
        found = self.difference.cause if self.difference is not None else ""
        return "unknown" if found == "no_events" else found


def expected_of(prepared: Prepared, worker: Worker, rank: int, block_size: int) -> Expected | None:
    """Return what a request makes us expect of a worker, ``None`` where nothing was predicted.

    Where the request is exact only up to an image, the complete blocks before it are expected and no more; of a cache
    with a sliding window, the blocks that a hit needs (docs/engine-facts/vllm.md#sliding-windows).
    """
    if prepared.exactness == "affinity":
        return None
    scope = worker.scope
    known = {image.identity for image in prepared.images if image.resolved}
    stops = [span.offset for span in prepared.spans if span.identity not in known]
    ids, spans = prepared.ids, prepared.spans
    if scope is not None:
        filled = prepared.filled(scope)
        if filled.unknown is not None:
            stops.append(spans[filled.unknown].offset)
        ids, spans = filled.ids, ()
    blocks = min([len(ids), *stops]) // block_size
    keys = prepared.keys(block_size, scope)[:blocks]
    if worker.group.window:
        hit = (len(ids) - 1) // block_size
        keys = keys[max(0, hit - window_blocks(worker.group.window, block_size)) : hit]
    if not keys:
        return None
    return Expected(
        worker=worker.member.uid,
        rank=rank,
        epoch=worker.follower.epoch,
        seq=worker.follower.seq,
        keys=keys,
        prediction=Prediction(
            ids[: blocks * block_size],
            tuple(span for span in spans if span.offset < blocks * block_size),
            block_size,
            prepared.salt,
            prepared.ids[prepared.spans[0].offset] if prepared.spans else -1,
        ),
    )


async def judge(expected: Expected, fleet: Fleet, feeder: Feed | None, *, seconds: float) -> Verdict:
    """Wait until the worker holds everything that was expected, at most so long; else name the first difference."""
    worker = fleet.workers.get(expected.worker)
    if worker is None or feeder is None:
        return _unknown(expected, "the worker is gone")
    if await _held(expected, worker, fleet, seconds):
        return Verdict("True", len(expected.keys))
    if not worker.follower.synced or worker.follower.epoch != expected.epoch:
        return _unknown(expected, "the engine or its feed began anew since the decision")
    first, end = expected.seq + 1, min(worker.follower.seq, expected.seq + MAX_DETAIL)
    try:
        stored, gone = await published(worker, feeder, expected.rank, expected.epoch, first, end)
    except FeedSilentError as error:
        return _unknown(expected, f"the sidecar does not tell what was published: {error}")
    if gone:
        return _unknown(expected, "not all that the engine published since can be read any more")
    found = first_difference(expected.prediction, stored, alone=False)
    if found is None:
        # Everything was published as predicted and some of it is no longer held: an eviction, not a difference.
        return _unknown(expected, "published as predicted, and evicted since")
    result: Result = "Unknown" if found.cause in ("unknown", "no_events") else "False"
    return Verdict(result, len(expected.keys), found)


async def published(
    worker: Worker, feeder: Feed, rank: int, epoch: int, first: int, end: int
) -> tuple[list[Stored], bool]:
    """Return the blocks that one rank stored in deltas ``first`` .. ``end``, and whether some are missing there.

    Missing are batches that the sidecar no longer has, and blocks that the engine named without their place. Raises
    :class:`FeedSilentError`.
    """
    stored: list[Stored] = []
    gone = False
    if end < first:
        return stored, gone
    decode = adapter(worker.beat.engine if worker.beat is not None else "vllm").decode_batch
    for part in await feeder.question(lambda number: feed.DetailRequest(number, epoch, first, end)):
        if not isinstance(part, feed.DetailPart):
            continue
        gone |= part.gone
        for raw in part.batches:
            if raw.rank != rank:
                continue
            try:
                events = decode(raw.payload).events
            except EventError:
                continue  # counted by the sidecar, which has seen the same bytes
            stored += [event for event in events if isinstance(event, Stored)]
            gone |= any(isinstance(event, Ragged) and event.hashes for event in events)
    return stored, gone


def verdict_json(verdict: Verdict, expected: Expected, prompter: Prompter | None) -> dict[str, Any]:
    """A verdict as plain values, the first differing block decoded."""
    difference = verdict.difference
    shown: dict[str, Any] = {"result": verdict.result, "cause": verdict.cause, "blocks": verdict.blocks}
    if difference is None:
        return shown
    shown["message"] = difference.message
    if difference.block is not None and difference.predicted is not None and difference.published is not None:
        size = expected.prediction.block_size
        shown["block"] = {
            "number": difference.block,
            "first_token": difference.block * size,
            "predicted": side_json(difference.predicted, expected.prediction.placeholder_id, prompter),
            "published": side_json(difference.published, expected.prediction.placeholder_id, prompter),
        }
    return shown


def side_json(side: Side, placeholder_id: int, prompter: Prompter | None) -> dict[str, Any]:
    """One side's piece of a prompt as plain values, decoded."""
    images = [{"identity": to_wire(identity), "starts_at": start} for start, identity in side.images]
    return {"text": _text(side.ids, placeholder_id, prompter), "tokens": list(side.ids), "images": images}


def _text(ids: Sequence[int], placeholder: int, prompter: Prompter | None) -> str:
    """Token ids as text, a run of image tokens as one note."""
    pieces: list[str] = []
    run: list[int] = []
    image = 0

    def flush() -> None:
        nonlocal image
        if image:
            pieces.append(f"[{image} image tokens]")
        elif run:
            pieces.append(str(run) if prompter is None else prompter.tokenizer.decode(run, skip_special_tokens=False))
        image = 0
        run.clear()

    for token in ids:
        is_image = token == placeholder or token >= SENTINEL_BASE
        if is_image != bool(image):
            flush()
        if is_image:
            image += 1
        else:
            run.append(token)
    flush()
    return "".join(pieces)


async def _held(expected: Expected, worker: Worker, fleet: Fleet, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            while True:
                worker.moved.clear()
                slot = worker.slots.get(expected.rank)
                if slot is not None and all(fleet.index.holds(slot, key) for key in expected.keys):
                    return True
                if worker.follower.epoch != expected.epoch:
                    return False
                await worker.moved.wait()
                await asyncio.sleep(CHECK_SECONDS)
    except TimeoutError:
        return False


def _unknown(expected: Expected, why: str) -> Verdict:
    return Verdict("Unknown", len(expected.keys), Difference("unknown", why))
