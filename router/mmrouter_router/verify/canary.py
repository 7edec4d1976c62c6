"""Canary: verify each worker once per epoch by two small images whose blocks are predicted (docs/exactness.md).

A model whose images have no place in a prediction is verified by a text. Where the engine writes sentinels, an unknown
image is first learned by a probe request of its own.
"""

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from mmrouter_lib import feed
from mmrouter_lib.block_keys import block_keys
from mmrouter_lib.engines.base.events import Stored
from mmrouter_router.explain.differences import Difference, Prediction, first_difference
from mmrouter_router.explain.parity_check import published_blocks
from mmrouter_router.fleet.cache_query import cache_query
from mmrouter_router.fleet.feed_client import FeedClient
from mmrouter_router.fleet.workers import Fleet, Target, Worker
from mmrouter_router.request.renderer_client import new_nonce
from mmrouter_router.sentinels.evidence import SentinelStore
from mmrouter_router.sentinels.table import Scope, Values, fill_sentinels, observe_sentinels
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
LATE_SECONDS = 15.0  # for engines that publish late (docs/engine-facts/sglang.md#block-size-and-timing)
POLL_SECONDS = 0.25
INCONCLUSIVE = ("no_events", "unknown")  # causes of a difference that may vanish after a longer wait


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

        Raises :class:`ProbeRequestError` or ``FeedSilentError``.
        """
        epoch = worker.sync.epoch
        claim = (await feeder.request(lambda n: feed.CanaryClaim(n, epoch, self._router_id, LEASE_SECONDS)))[-1]
        if not isinstance(claim, feed.ClaimAnswer) or not claim.granted:
            return None
        difference: Difference | None = None
        compared = 0
        compare = self.compare if worker.member.role in self._probes.publishing_roles else self._answers
        for rank in range(worker.ranks):
            difference, blocks = await compare(Target(worker, rank, block_size), feeder)
            size = worker.heartbeat.block_size if worker.heartbeat is not None else 0
            if difference is not None and size not in (0, block_size):
                # Full attention may have larger blocks than the metrics report; the heartbeat has its events' size.
                block_size = size
                difference, blocks = await compare(Target(worker, rank, block_size), feeder)
            compared += blocks
            if difference is not None:
                break
        cause, message = (difference.cause, difference.message) if difference else ("", "")
        verified: Literal["True", "False"] = "False" if difference else "True"
        result = feed.CanaryReport(epoch, verified, cause, message, compared, self._router_id)
        self._metrics.parity.labels(result.result, result.cause).inc()
        await feeder.request(lambda n: feed.CanaryResult(n, result))
        detail = f": {result.message}" if result.message else ""
        log.info("%s: canary %s, %d blocks%s", worker.member.name, result.result, compared, detail)
        return result

    async def learn(self, target: Target, feeder: FeedClient, image: ProbeImage) -> bool:
        """Ask what an engine makes of an image. Returns whether it is known then.

        Raises :class:`ProbeRequestError` or ``FeedSilentError``.
        """
        worker = target.worker
        request = await self._probes.build(new_nonce(), image, target.block_size)
        before = worker.sync.seq
        await self._probes.send(target, request)
        try:
            async with asyncio.timeout(LATE_SECONDS):
                seen = before
                while True:
                    worker.delta_event.clear()
                    if worker.sync.seq != seen:
                        seen = worker.sync.seq
                        stored = await _published_since(target, feeder, before)
                        if self._observe(target, request, image, stored):
                            return True
                    await _next_delta(worker)
        except TimeoutError:
            return False

    async def compare(self, target: Target, feeder: FeedClient) -> tuple[Difference | None, int]:
        """Compare the probe images' blocks at one rank; returns the first difference and the blocks compared."""
        nonce = new_nonce()
        compared = 0
        # With sentinels, a comparison learns the image's values. Else an engine that only stalled gets a second chance,
        # because a result is final for the epoch.
        scope = target.worker.scope
        retried = INCONCLUSIVE if scope is None else ("identity",)
        for image in self._probes.canary_images():
            if scope is not None and image is not None and self._values(scope, image) is None:
                await self.learn(target, feeder, image)
            difference, blocks = await self._ask(target, feeder, nonce, image)
            if difference is not None and difference.cause in retried:
                difference, blocks = await self._ask(target, feeder, new_nonce(), image)
            if difference is not None and scope is not None and difference.cause in INCONCLUSIVE:
                raise ProbeRequestError(f"its blocks were not published in time: {difference.message}")
            if difference is not None:
                return difference, compared
            compared += blocks
        return None, compared

    async def _answers(self, target: Target, _: FeedClient) -> tuple[Difference | None, int]:
        """Verify an engine that publishes no blocks by the length of its prompt."""
        image = self._probes.canary_images()[0]
        request = await self._probes.build(new_nonce(), image, target.block_size)
        tokens = prompt_tokens(await self._probes.send(target, request))
        predicted = len(request.ids)
        if tokens != predicted:
            return Difference("count", f"the prompt has {tokens} tokens, predicted were {predicted}"), 0
        return None, 0

    async def _ask(
        self, target: Target, feeder: FeedClient, nonce: str, image: ProbeImage | None
    ) -> tuple[Difference | None, int]:
        """Send an image, or a text alone, and wait for the predicted blocks.

        Returns the first difference and the number compared.
        """
        request = await self._probes.build(nonce, image, target.block_size)
        scope, before = target.worker.scope, target.worker.sync.seq
        prediction = self._predict(scope, request, image, target.block_size)
        await self._probes.send(target, request)
        missing, keys = await self._missing(target, prediction)
        if not missing:
            return None, keys
        stored = await _published_since(target, feeder, before)
        self._observe(target, request, image, stored)
        complete = replace(prediction, ids=prediction.ids[: keys * target.block_size])
        # Blocks that are published late may be missing among those of other requests.
        difference = first_difference(complete, stored, alone=scope is None)
        return difference or Difference("unknown", f"{missing} of {keys} predicted keys were not published"), 0

    def _predict(
        self, scope: Scope | None, request: ProbeRequest, image: ProbeImage | None, block_size: int
    ) -> Prediction:
        spans = () if request.span is None else (request.span,)
        placeholder = -1 if request.span is None else request.ids[request.span.offset]
        if scope is None:
            return Prediction(request.ids, spans, block_size, None, placeholder)
        values = None if image is None else self._values(scope, image)
        ids = fill_sentinels(request.ids, spans, lambda _: values).ids
        return Prediction(ids[: len(ids) - self._probes.unkept], (), block_size, None, placeholder)

    def _values(self, scope: Scope, image: ProbeImage) -> Values | None:
        return self._sentinels.values(scope, image.identity, image.data) if self._sentinels is not None else None

    def _observe(
        self, target: Target, request: ProbeRequest, image: ProbeImage | None, stored: Sequence[Stored]
    ) -> bool:
        """Record the image's sentinels in these blocks; return whether they are there."""
        scope = target.worker.scope
        if image is None or request.span is None:
            return False
        values = observe_sentinels(request.ids, request.span, target.block_size, stored) if scope is not None else None
        if values is not None and scope is not None and self._sentinels is not None:
            self._sentinels.on_observed(scope, image.identity, image.data, values)
        return values is not None

    async def _missing(self, target: Target, prediction: Prediction) -> tuple[int, int]:
        """Wait until the index has every predicted key that the engine keeps; return the missing ones, and all.

        The first blocks of an engine show its lookahead, so keys are computed after each delta.
        """
        worker, ids, size = target.worker, prediction.ids, prediction.block_size
        missing, keys = 1, array("Q")
        try:
            async with asyncio.timeout(EVENTS_SECONDS if worker.scope is None else LATE_SECONDS):
                while True:
                    worker.delta_event.clear()
                    keys = block_keys(ids, size, prediction.spans, self._seed, worker.layout.lookahead)
                    slot = worker.slots.get(target.rank)
                    if slot is None:
                        missing = len(keys)
                    elif worker.layout.whole:
                        missing = sum(not self._fleet.index.holds(slot, key) for key in keys)
                    else:
                        # A window does not keep a block that ends with the prompt's last token.
                        hits = self._fleet.lookup(keys, len(ids), cache_query([target]))
                        missing = min(len(keys), (len(ids) - 1) // size) - hits[slot]
                    if not missing:
                        return 0, len(keys)
                    await _next_delta(worker)
        except TimeoutError:
            return missing, len(keys)


async def _published_since(target: Target, feeder: FeedClient, seq: int) -> Sequence[Stored]:
    """Return the blocks that a rank stored after delta ``seq``."""
    sync = target.worker.sync
    stored, _ = await published_blocks(target.worker, feeder, target.rank, sync.epoch, seq + 1, sync.seq)
    return stored


async def _next_delta(worker: Worker) -> None:
    """Wait for a delta, at most :data:`POLL_SECONDS`, because another waiter may have cleared the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(POLL_SECONDS):
            await worker.delta_event.wait()
