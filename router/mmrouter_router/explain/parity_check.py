"""Compare a decision's predicted blocks with those that the chosen engine holds and published (docs/exactness.md).

Only the worker's sidecar is queried: client requests, their streams and the engine are not affected.
"""

import asyncio
from array import array
from dataclasses import dataclass
from typing import Any

from mmrouter_lib import feed
from mmrouter_lib.cache_layout import DEVICE, window_blocks
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.events import EventError, Ragged, Stored
from mmrouter_lib.engines.sglang.hidden_groups import STATES
from mmrouter_lib.prompt import AnyPrompter
from mmrouter_router.explain.differences import Difference, Prediction, Result, first_difference, side_json
from mmrouter_router.fleet.feed_client import FeedClient, FeedRequestError
from mmrouter_router.fleet.workers import Fleet, Target, Worker
from mmrouter_router.request.prepared import Prepared

CHECK_SECONDS = 0.02  # shortest interval between checks: a busy engine publishes hundreds of deltas
MAX_DETAIL = 4096  # largest number of deltas whose raw batches are requested


@dataclass(frozen=True, slots=True)
class ExpectedBlocks:
    """Blocks that the engine of one decision should hold, part of the prediction's prompt.

    ``epoch`` and ``seq``: position of the worker's feed at the decision. ``whole``: the engine keeps every complete
    block, and not only those before a state (:mod:`mmrouter_lib.engines.sglang.hidden_groups`).
    """

    worker: str  # pod uid
    rank: int
    epoch: int
    seq: int
    keys: "array[int]"
    prediction: Prediction
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the engine holds the predicted blocks; ``Unknown`` where the evidence is gone."""

    result: Result
    blocks: int
    difference: Difference | None = None

    @property
    def cause(self) -> str:
        cause = self.difference.cause if self.difference is not None else ""
        return "unknown" if cause == "no_events" else cause


def expected_blocks(prepared: Prepared, target: Target) -> ExpectedBlocks | None:
    """Return the blocks that a worker should hold after a request, ``None`` where nothing was predicted.

    For a request that is exact up to an image, the complete blocks before it; for a cache without full
    attention, the blocks that a hit needs (docs/engine-facts/vllm.md#sliding-windows).
    """
    if prepared.exactness == "affinity":
        return None
    worker, rank, _ = target
    block_size, scope, lookahead = target.key_form
    resolved = {image.name for image in prepared.images if image.resolved}
    stops = [span.offset for span in prepared.spans if span.identity not in resolved]
    ids, spans = prepared.ids, prepared.spans
    if scope is not None:
        filled = prepared.filled(scope)
        if filled.unknown is not None:
            stops.append(spans[filled.unknown].offset)
        ids, spans = filled.ids, ()
    blocks = max(0, min([len(ids), *stops]) - lookahead) // block_size
    keys = prepared.keys(*target.key_form)[:blocks]
    if not worker.layout.whole:
        hit = min(len(keys), (len(ids) - 1) // block_size)
        keys = keys[max(0, hit - window_blocks(worker.layout.tails[0].tokens, block_size)) : hit]
    if not keys:
        return None
    end = blocks * block_size
    shown = tuple(sorted((span for span in spans if span.offset < end), key=lambda span: span.offset))
    placeholder = prepared.ids[prepared.spans[0].offset] if prepared.spans else -1
    prediction = Prediction(ids[:end], shown, block_size, prepared.salt, placeholder)
    whole = STATES not in prepared.hidden
    return ExpectedBlocks(worker.member.uid, rank, worker.sync.epoch, worker.sync.seq, keys, prediction, whole)


async def check_parity(expected: ExpectedBlocks, fleet: Fleet, feeder: FeedClient | None, *, seconds: float) -> Verdict:
    """Wait up to ``seconds`` for the worker to hold the expected blocks; else return the first difference."""
    worker = fleet.workers.get(expected.worker)
    if worker is None or feeder is None:
        return _unknown(expected, "the worker is gone")
    if await _held(expected, worker, fleet, seconds):
        return Verdict("True", len(expected.keys))
    if not worker.sync.synced or worker.sync.epoch != expected.epoch:
        return _unknown(expected, "the engine or its feed restarted since the decision")
    first, end = expected.seq + 1, min(worker.sync.seq, expected.seq + MAX_DETAIL)
    try:
        stored, gone = await published_blocks(worker, feeder, expected.rank, expected.epoch, first, end)
    except FeedRequestError as error:
        return _unknown(expected, f"the sidecar does not return the published blocks: {error}")
    if gone:
        return _unknown(expected, "some blocks published since the decision are no longer available")
    # A long prompt is compared at each of its blocks with each run of blocks that was published since.
    difference = await asyncio.to_thread(first_difference, expected.prediction, stored, alone=False)
    if difference is not None and difference.cause == "truncation" and not expected.whole:
        return Verdict("True", len(expected.keys))
    if difference is None:
        # Published as predicted and no longer held is an eviction, not a difference.
        return _unknown(expected, "published as predicted, and evicted since")
    result: Result = "Unknown" if difference.cause in ("unknown", "no_events") else "False"
    return Verdict(result, len(expected.keys), difference)


async def published_blocks(
    worker: Worker, feeder: FeedClient, rank: int, epoch: int, first: int, end: int
) -> tuple[list[Stored], bool]:
    """Return the blocks that one rank stored in deltas ``first`` .. ``end``, and whether some are missing.

    Missing are batches that the sidecar no longer has, and blocks that the engine published without their place.
    Raises :class:`FeedRequestError`.
    """
    stored: list[Stored] = []
    gone = False
    if end < first:
        return stored, gone
    decode = adapter(worker.heartbeat.engine if worker.heartbeat is not None else "vllm").decode_batch
    for part in await feeder.request(lambda number: feed.DetailRequest(number, epoch, first, end)):
        if not isinstance(part, feed.DetailPart):
            continue
        gone |= part.gone
        for raw in part.batches:
            if raw.rank != rank:
                continue
            try:
                batch = decode(raw.payload)
            except EventError:
                continue  # counted by the sidecar, which has seen the same bytes
            for event in batch.events:
                if not isinstance(event, Stored | Ragged) or event.group != worker.layout.primary:
                    continue
                if isinstance(event, Ragged):
                    gone |= bool(event.hashes)
                elif event.medium == DEVICE:
                    stored.append(event)
    return stored, gone


def verdict_json(verdict: Verdict, expected: ExpectedBlocks, prompter: AnyPrompter | None) -> dict[str, Any]:
    """Return a verdict as JSON values, with the first differing block decoded."""
    difference = verdict.difference
    shown: dict[str, Any] = {"result": verdict.result, "cause": verdict.cause, "blocks": verdict.blocks}
    if difference is None:
        return shown
    shown["message"] = difference.message
    if difference.block is not None and difference.predicted is not None and difference.published is not None:
        size, placeholder = expected.prediction.block_size, expected.prediction.placeholder_id
        shown["block"] = {
            "number": difference.block,
            "first_token": difference.block * size,
            "predicted": side_json(difference.predicted, placeholder, prompter),
            "published": side_json(difference.published, placeholder, prompter),
        }
    return shown


async def _held(expected: ExpectedBlocks, worker: Worker, fleet: Fleet, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            while True:
                worker.delta_event.clear()
                slot = worker.slots.get(expected.rank)
                if slot is not None and all(fleet.index.holds(slot, key) for key in expected.keys):
                    return True
                if worker.sync.epoch != expected.epoch:
                    return False
                await worker.delta_event.wait()
                await asyncio.sleep(CHECK_SECONDS)
    except TimeoutError:
        return False


def _unknown(expected: ExpectedBlocks, why: str) -> Verdict:
    return Verdict("Unknown", len(expected.keys), Difference("unknown", why))
