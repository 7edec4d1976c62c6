"""The canary: once per worker and epoch, two tiny images under one text, predicted and compared (docs/exactness.md).

Where the engine puts identity into the token ids, an image that is not known yet is first asked about under another
text; then the canary predicts and compares as everywhere.
"""

import asyncio
import contextlib
import logging
from array import array

from mmrouter_lib import feed
from mmrouter_lib.block_keys import block_keys
from mmrouter_router.core.probe_images import new_nonce, small_pictures
from mmrouter_router.core.types import Scope
from mmrouter_router.explain.parity import Difference, Prediction, first_difference
from mmrouter_router.fleet.feed_client import Feed
from mmrouter_router.fleet.workers import Fleet, Target, Worker
from mmrouter_router.scheduling.pipeline_form import publishes
from mmrouter_router.sentinels import Sentinels, Values, fill, observe
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.verify.probe_requests import OwnRequestError, OwnRequests, Picture, Question, prompt_tokens

log = logging.getLogger("mmrouter.canary")

LEASE_SECONDS = 30.0
EVENTS_SECONDS = 5.0
LATE_SECONDS = 15.0
"""For engines that publish a request's blocks when they find the time.

See docs/engine-facts/sglang.md#block-size-and-timing.
"""
LOOK_SECONDS = 0.25
NOTHING_CAME = ("no_events", "unknown")
"""Causes of a difference that may be only that of the time that was waited."""


class Canary:
    """Runs canaries against workers and hands the results to their sidecars."""

    def __init__(
        self, router_id: str, fleet: Fleet, own: OwnRequests, sentinels: Sentinels | None, seed: int, metrics: Metrics
    ) -> None:
        """``seed``: the seed of chains without a tenant's salt."""
        self._router_id, self._fleet, self._own, self._sentinels = router_id, fleet, own, sentinels
        self._seed, self._metrics = seed, metrics

    async def verify(self, worker: Worker, feeder: Feed, block_size: int) -> feed.CanaryReport | None:
        """Claim the canary of the worker's epoch and run it. ``None``: another router holds the claim, or it moved on.

        Raises :class:`OwnRequestError` or ``FeedSilentError`` when it could not be carried out.
        """
        epoch = worker.follower.epoch
        claim = (await feeder.question(lambda n: feed.CanaryClaim(n, epoch, self._router_id, LEASE_SECONDS)))[-1]
        if not isinstance(claim, feed.ClaimAnswer) or not claim.granted:
            return None
        difference: Difference | None = None
        compared = 0
        compare = self._compare if publishes(self._own.engine, worker.member.role) else self._answers
        for rank in range(worker.ranks):
            difference, blocks = await compare(worker, rank, feeder, block_size)
            compared += blocks
            if difference is not None:
                break
        result = feed.CanaryReport(
            epoch=epoch,
            result="True" if difference is None else "False",
            cause=difference.cause if difference else "",
            message=difference.message if difference else "",
            compared=compared,
            router=self._router_id,
        )
        self._metrics.parity.labels(result.result, result.cause).inc()
        await feeder.question(lambda n: feed.CanaryResult(n, result))
        said = f": {result.message}" if result.message else ""
        log.info("%s: canary %s, %d blocks%s", worker.member.name, result.result, compared, said)
        return result

    async def learn(self, worker: Worker, rank: int, feeder: Feed, block_size: int, picture: Picture) -> bool:
        """Ask what the worker's engine makes of a picture. Returns whether it is known then.

        Raises :class:`OwnRequestError` or ``FeedSilentError``.
        """
        question = await self._own.question(new_nonce(), picture, block_size)
        before = worker.follower.seq
        await self._own.send(worker, rank, question)
        try:
            async with asyncio.timeout(LATE_SECONDS):
                seen = before
                while True:
                    worker.moved.clear()
                    if worker.follower.seq != seen:
                        seen = worker.follower.seq
                        published = await self._own.published(worker, rank, feeder, before)
                        values = observe(question.ids, question.span, block_size, published)
                        if values is not None:
                            self._observed(worker, picture, values)
                            return True
                    await _moved(worker)
        except TimeoutError:
            return False

    async def _compare(self, worker: Worker, rank: int, feeder: Feed, block_size: int) -> tuple[Difference | None, int]:
        nonce = new_nonce()
        compared = 0
        for picture in map(self._own.picture, small_pictures()):
            if worker.scope is not None and self._values(worker.scope, picture) is None:
                await self.learn(worker, rank, feeder, block_size, picture)
            difference, blocks = await self._ask(worker, rank, feeder, block_size, nonce, picture)
            if difference is not None and difference.cause == "identity" and worker.scope is not None:
                # Its values are known better now; if they were the only difference, nothing differs any more.
                difference, blocks = await self._ask(worker, rank, feeder, block_size, new_nonce(), picture)
            elif difference is not None and difference.cause in NOTHING_CAME and worker.scope is None:
                # A result stands as long as the engine runs: what stood still for a moment publishes the next one.
                difference, blocks = await self._ask(worker, rank, feeder, block_size, new_nonce(), picture)
            if difference is not None and worker.scope is not None and difference.cause in NOTHING_CAME:
                raise OwnRequestError(f"its blocks were not published in time: {difference.message}")
            if difference is not None:
                return difference, compared
            compared += blocks
        return None, compared

    async def _answers(self, worker: Worker, rank: int, feeder: Feed, block_size: int) -> tuple[Difference | None, int]:
        """Let an engine that publishes nothing answer: its prompt is as long as predicted. No block is compared."""
        picture = self._own.picture(small_pictures()[0])
        question = await self._own.question(new_nonce(), picture, block_size)
        tokens = prompt_tokens(await self._own.send(worker, rank, question))
        predicted = len(question.ids)
        if tokens != predicted:
            return Difference("count", f"its prompt has {tokens} tokens, and {predicted} were predicted"), 0
        return None, 0

    async def _ask(
        self, worker: Worker, rank: int, feeder: Feed, block_size: int, nonce: str, picture: Picture
    ) -> tuple[Difference | None, int]:
        """Send a picture and wait for the predicted blocks; return the first difference and how many were compared."""
        question = await self._own.question(nonce, picture, block_size)
        prediction, keys = self._predict(worker.scope, question, picture, block_size)
        before = worker.follower.seq
        await self._own.send(worker, rank, question)
        missing = await self._missing(worker, rank, keys, len(question.ids), block_size)
        if not missing:
            return None, len(keys)
        stored = await self._own.published(worker, rank, feeder, before)
        if worker.scope is not None and (values := observe(question.ids, question.span, block_size, stored)):
            self._observed(worker, picture, values)
        # What came so late that another request's blocks stand there alone says nothing about this one.
        found = first_difference(prediction, stored, alone=worker.scope is None)
        return found or Difference("unknown", f"{missing} of {len(keys)} predicted keys never came"), 0

    def _predict(
        self, scope: Scope | None, question: Question, picture: Picture, block_size: int
    ) -> tuple[Prediction, "array[int]"]:
        placeholder = question.ids[question.span.offset]
        if scope is None:
            keys = block_keys(question.ids, block_size, (question.span,), self._seed)
            return Prediction(question.ids, (question.span,), block_size, None, placeholder), keys
        ids = fill(question.ids, (question.span,), lambda identity: self._values(scope, picture)).ids
        return Prediction(ids, (), block_size, None, placeholder), block_keys(ids, block_size, (), self._seed)

    def _values(self, scope: Scope, picture: Picture) -> Values | None:
        return self._sentinels.values(scope, picture.identity, picture.data) if self._sentinels is not None else None

    def _observed(self, worker: Worker, picture: Picture, values: Values) -> None:
        if self._sentinels is not None and worker.scope is not None:
            self._sentinels.observed(worker.scope, picture.identity, picture.data, values)

    async def _missing(self, worker: Worker, rank: int, keys: "array[int]", tokens: int, block_size: int) -> int:
        """Wait until every predicted key that the engine keeps is in the index; return how many never came."""
        missing = len(keys)
        try:
            async with asyncio.timeout(EVENTS_SECONDS if worker.scope is None else LATE_SECONDS):
                while True:
                    worker.moved.clear()
                    slot = worker.slots.get(rank)
                    found = self._fleet.overlap(keys, tokens, [Target(worker, rank, block_size)])
                    # A block that ends with the prompt's last token is none that a window keeps.
                    expected = (tokens - 1) // block_size if worker.group.window else len(keys)
                    missing = expected - found.get(slot, 0) if slot is not None else len(keys)
                    if not missing:
                        return 0
                    await _moved(worker)
        except TimeoutError:
            return missing


async def _moved(worker: Worker) -> None:
    """Wait for a delta; no longer than a moment, because somebody else may have cleared the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LOOK_SECONDS):
            await worker.moved.wait()


__all__ = ["Canary", "OwnRequestError"]
