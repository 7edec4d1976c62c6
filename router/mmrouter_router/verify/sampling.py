"""Sample live parity: predicted blocks of a share of requests against those that the engine holds (docs/exactness.md).

With a renderer, a sample is also compared with the renderer's prompt. A sample is checked after the answer went out, so
no client waits. A hash of the request id decides which requests are sampled, so every router decides alike. Work and
held bytes are bounded; excess samples are dropped and counted.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import orjson
from xxhash import xxh3_64_intdigest

from mmrouter_router.explain.decisions import DecisionTrace
from mmrouter_router.explain.differences import PredictedPrompt, RenderVerdict, compare_rendering, predicted_prompt
from mmrouter_router.explain.parity_check import Verdict, check_parity
from mmrouter_router.fleet.feed_client import FeedClient
from mmrouter_router.fleet.workers import Fleet
from mmrouter_router.http.engine_requests import EngineRequestError
from mmrouter_router.request.prepared import CHAT, Prepared
from mmrouter_router.request.renderer_client import Renderer
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.parity")

QUEUE = 256
COMPARERS = 4
RENDERINGS = 64
RENDERERS_ASKED = 2
HELD_BYTES = 64 << 20  # bound of the bodies and prompts that wait for renderers
EVENTS_SECONDS = 10.0  # for blocks to arrive after the answer (docs/engine-facts/sglang.md#block-size-and-timing)


class ParitySampler:
    """Samples requests and checks their blocks in the background."""

    def __init__(
        self, ratio: float, fleet: Fleet, feed_of: Callable[[str], FeedClient | None], metrics: Metrics
    ) -> None:
        """``ratio``: ``spec.verification.sampleRatio``, 0 to 1. ``feed_of``: pod uid -> its feed client."""
        self._threshold = int(ratio * 2**64)
        self._fleet, self._feed_of, self._metrics = fleet, feed_of, metrics
        self.queue: asyncio.Queue[DecisionTrace] = asyncio.Queue(QUEUE)

    def wants(self, request_id: str) -> bool:
        return xxh3_64_intdigest(request_id.encode()) < self._threshold

    def offer(self, trace: DecisionTrace) -> None:
        """Queue an answered request if it is sampled and was predicted. Never waits."""
        if trace.expected is None or not self.wants(trace.request_id):
            return
        try:
            self.queue.put_nowait(trace)
        except asyncio.QueueFull:
            self._metrics.parity_dropped.inc()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(COMPARERS):
                tasks.create_task(self._compare_all())

    async def _compare_all(self) -> None:
        while True:
            trace = await self.queue.get()
            verdict = trace.parity = await self.check(trace, seconds=EVENTS_SECONDS)
            if verdict is None:
                continue
            self._metrics.parity.labels(verdict.result, verdict.cause).inc()
            if verdict.result == "False" and verdict.difference is not None:
                difference = verdict.cause, verdict.difference.message
                log.warning("%s: blocks differ from the prediction: %s: %s", trace.request_id, *difference)

    async def check(self, trace: DecisionTrace, *, seconds: float) -> Verdict | None:
        """Check one request without counting it; ``None`` where nothing was predicted."""
        if (expected := trace.expected) is None:
            return None
        return await check_parity(expected, self._fleet, self._feed_of(expected.worker), seconds=seconds)


@dataclass(frozen=True, slots=True)
class _RenderSample:
    """A sample that waits for a renderer: the body that the engine got, and its predicted prompt."""

    trace: DecisionTrace
    prompt: PredictedPrompt
    body: bytes

    @property
    def size(self) -> int:
        return len(self.body) + self.prompt.ids.itemsize * len(self.prompt.ids)


class RenderSampler:
    """Compares sampled predictions with a renderer's prompts in the background."""

    def __init__(self, wants: Callable[[str], bool], renderer: Renderer, metrics: Metrics) -> None:
        """``wants``: whether a request id is sampled."""
        self._wants, self._renderer, self._metrics, self._free_bytes = wants, renderer, metrics, HELD_BYTES
        self.queue: asyncio.Queue[_RenderSample] = asyncio.Queue(RENDERINGS)

    def offer(self, trace: DecisionTrace, prepared: Prepared, body: Callable[[], bytes]) -> None:
        """Queue an answered chat if it is sampled. ``body`` returns it with its images. Never waits."""
        if prepared.request.endpoint != CHAT or not self._wants(trace.request_id):
            return
        if (prompt := predicted_prompt(prepared)) is None:
            return
        images = sum(4 * len(image.media.data) // 3 for image in prepared.images)
        if self.queue.full() or images > self._free_bytes:
            self._metrics.parity_dropped.inc()
            return
        sample = _RenderSample(trace, prompt, body())
        if sample.size > self._free_bytes:
            self._metrics.parity_dropped.inc()
            return
        self._free_bytes -= sample.size
        self.queue.put_nowait(sample)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(RENDERERS_ASKED):
                tasks.create_task(self._compare_all())

    async def _compare_all(self) -> None:
        while True:
            sample = await self.queue.get()
            verdict = sample.trace.rendering = await self._compare(sample)
            self._metrics.parity.labels(verdict.result, verdict.cause).inc()
            if verdict.result == "False":
                log.warning("%s: prediction differs from rendering: %s", sample.trace.request_id, verdict.message)
            self._free_bytes += sample.size
            del sample  # release its bytes while waiting for the next one

    async def _compare(self, sample: _RenderSample) -> RenderVerdict:
        try:
            ids, spans = await self._renderer.render(await asyncio.to_thread(orjson.loads, sample.body))
        except EngineRequestError as error:
            return RenderVerdict("Unknown", 0, f"renderer_{error.cause}", str(error))
        return compare_rendering(sample.prompt, ids, spans)
