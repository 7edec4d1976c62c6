"""Canary: verify each worker once per epoch by two small images whose blocks are predicted (docs/exactness.md).

Where the engine writes sentinels, an unknown image is first learned by a probe request of its own.
"""

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Sequence

from mmrouter_lib import feed
from mmrouter_lib.block_keys import block_keys
from mmrouter_lib.engines.base.events import Stored
from mmrouter_router.core.probe_images import new_nonce, small_pictures
from mmrouter_router.core.types import Scope
from mmrouter_router.explain.block_diff import Difference, Prediction, first_difference
from mmrouter_router.explain.parity_check import published_blocks
from mmrouter_router.fleet.feed_client import FeedClient
from mmrouter_router.fleet.workers import Fleet, Target, Worker, cache_query
from mmrouter_router.scheduling.pipeline_form import publishes_blocks
from mmrouter_router.sentinels import SentinelStore, Values, fill_sentinels, observe_sentinels
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.verify.probe_requests import (
    ProbeImage,
    ProbeRequest,
    ProbeRequestError,
    ProbeRequests,
    prompt_tokens,
)

log = logging.getLogger("mmrouter.canary")

LEASE_SECONDS = 30.0
EVENTS_SECONDS = 5.0
LATE_SECONDS = 15.0
"""For engines that publish a request's blocks late.

See docs/engine-facts/sglang.md#block-size-and-timing.
"""
POLL_SECONDS = 0.25
INCONCLUSIVE = ("no_events", "unknown")
"""Causes of a difference that may vanish after a longer wait."""


class Canary:
    """Runs canaries against workers and reports the results to their sidecars."""

    def __init__(
        self,
        router_id: str,
        fleet: Fleet,
        probes: ProbeRequests,
        sentinels: SentinelStore | None,
        seed: int,
        metrics: Metrics,
    ) -> None:
        """``seed``: the seed of block keys without a tenant's salt."""
        self._router_id, self._fleet, self._probes, self._sentinels = router_id, fleet, probes, sentinels
        self._seed, self._metrics = seed, metrics

    async def verify(self, worker: Worker, feeder: FeedClient, block_size: int) -> feed.CanaryReport | None:
        """Claim the canary of the worker's epoch and run it. ``None``: another router holds the claim, or it moved on.

        Raises :class:`ProbeRequestError` or ``FeedSilentError`` when it could not be carried out.
        """
        epoch = worker.sync.epoch
        claim = (await feeder.request(lambda n: feed.CanaryClaim(n, epoch, self._router_id, LEASE_SECONDS)))[-1]
        if not isinstance(claim, feed.ClaimAnswer) or not claim.granted:
            return None
        difference: Difference | None = None
        compared = 0
        compare = self.compare if publishes_blocks(self._probes.engine, worker.member.role) else self._answers
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
        await feeder.request(lambda n: feed.CanaryResult(n, result))
        detail = f": {result.message}" if result.message else ""
        log.info("%s: canary %s, %d blocks%s", worker.member.name, result.result, compared, detail)
        return result

    async def learn(self, worker: Worker, rank: int, feeder: FeedClient, block_size: int, image: ProbeImage) -> bool:
        """Ask what the worker's engine makes of a image. Returns whether it is known then.

        Raises :class:`ProbeRequestError` or ``FeedSilentError``.
        """
        request = await self._probes.build(new_nonce(), image, block_size)
        before = worker.sync.seq
        await self._probes.send(worker, rank, request)
        try:
            async with asyncio.timeout(LATE_SECONDS):
                seen = before
                while True:
                    worker.delta_event.clear()
                    if worker.sync.seq != seen:
                        seen = worker.sync.seq
                        stored = await _published_since(worker, rank, feeder, before)
                        values = observe_sentinels(request.ids, request.span, block_size, stored)
                        if values is not None:
                            self._observed(worker, image, values)
                            return True
                    await _next_delta(worker)
        except TimeoutError:
            return False

    async def compare(
        self, worker: Worker, rank: int, feeder: FeedClient, block_size: int
    ) -> tuple[Difference | None, int]:
        """Compare the probe images' blocks at one rank; returns the first difference and the blocks compared."""
        nonce = new_nonce()
        compared = 0
        # With sentinels, a comparison learns the image's values. Else an engine that only stalled gets a second chance,
        # because a result is final for the epoch.
        retried = INCONCLUSIVE if worker.scope is None else ("identity",)
        for image in map(self._probes.image, small_pictures()):
            if worker.scope is not None and self._values(worker.scope, image) is None:
                await self.learn(worker, rank, feeder, block_size, image)
            difference, blocks = await self._ask(worker, rank, feeder, block_size, nonce, image)
            if difference is not None and difference.cause in retried:
                difference, blocks = await self._ask(worker, rank, feeder, block_size, new_nonce(), image)
            if difference is not None and worker.scope is not None and difference.cause in INCONCLUSIVE:
                raise ProbeRequestError(f"its blocks were not published in time: {difference.message}")
            if difference is not None:
                return difference, compared
            compared += blocks
        return None, compared

    async def _answers(
        self, worker: Worker, rank: int, feeder: FeedClient, block_size: int
    ) -> tuple[Difference | None, int]:
        """Verify an engine that publishes no blocks by the length of its prompt."""
        image = self._probes.image(small_pictures()[0])
        request = await self._probes.build(new_nonce(), image, block_size)
        tokens = prompt_tokens(await self._probes.send(worker, rank, request))
        predicted = len(request.ids)
        if tokens != predicted:
            return Difference("count", f"the prompt has {tokens} tokens, predicted were {predicted}"), 0
        return None, 0

    async def _ask(
        self, worker: Worker, rank: int, feeder: FeedClient, block_size: int, nonce: str, image: ProbeImage
    ) -> tuple[Difference | None, int]:
        """Send an image and wait for the predicted blocks; return the first difference and the number compared."""
        request = await self._probes.build(nonce, image, block_size)
        prediction, keys = self._predict(worker.scope, request, image, block_size)
        before = worker.sync.seq
        await self._probes.send(worker, rank, request)
        missing = await self._missing(worker, rank, keys, len(request.ids), block_size)
        if not missing:
            return None, len(keys)
        stored = await _published_since(worker, rank, feeder, before)
        if worker.scope is not None and (values := observe_sentinels(request.ids, request.span, block_size, stored)):
            self._observed(worker, image, values)
        # Blocks that are published late may be missing among those of other requests.
        difference = first_difference(prediction, stored, alone=worker.scope is None)
        return difference or Difference("unknown", f"{missing} of {len(keys)} predicted keys were not published"), 0

    def _predict(
        self, scope: Scope | None, request: ProbeRequest, image: ProbeImage, block_size: int
    ) -> tuple[Prediction, "array[int]"]:
        placeholder = request.ids[request.span.offset]
        if scope is None:
            keys = block_keys(request.ids, block_size, (request.span,), self._seed)
            return Prediction(request.ids, (request.span,), block_size, None, placeholder), keys
        ids = fill_sentinels(request.ids, (request.span,), lambda identity: self._values(scope, image)).ids
        return Prediction(ids, (), block_size, None, placeholder), block_keys(ids, block_size, (), self._seed)

    def _values(self, scope: Scope, image: ProbeImage) -> Values | None:
        return self._sentinels.values(scope, image.identity, image.data) if self._sentinels is not None else None

    def _observed(self, worker: Worker, image: ProbeImage, values: Values) -> None:
        if self._sentinels is not None and worker.scope is not None:
            self._sentinels.on_observed(worker.scope, image.identity, image.data, values)

    async def _missing(self, worker: Worker, rank: int, keys: "array[int]", tokens: int, block_size: int) -> int:
        """Wait until the index has every predicted key that the engine keeps; return the number of missing ones."""
        missing = len(keys)
        try:
            async with asyncio.timeout(EVENTS_SECONDS if worker.scope is None else LATE_SECONDS):
                while True:
                    worker.delta_event.clear()
                    slot = worker.slots.get(rank)
                    query = cache_query([Target(worker, rank, block_size)])
                    hits = self._fleet.lookup(keys, tokens, query)
                    # A window does not keep a block that ends with the prompt's last token.
                    expected = (tokens - 1) // block_size if worker.group.window else len(keys)
                    missing = expected - hits.get(slot, 0) if slot is not None else len(keys)
                    if not missing:
                        return 0
                    await _next_delta(worker)
        except TimeoutError:
            return missing


async def _published_since(worker: Worker, rank: int, feeder: FeedClient, seq: int) -> Sequence[Stored]:
    """Return the blocks that a rank stored after delta ``seq``."""
    stored, _ = await published_blocks(worker, feeder, rank, worker.sync.epoch, seq + 1, worker.sync.seq)
    return stored


async def _next_delta(worker: Worker) -> None:
    """Wait for a delta, at most :data:`POLL_SECONDS`, because another waiter may have cleared the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(POLL_SECONDS):
            await worker.delta_event.wait()
