"""Live parity: for a share of the requests, what was predicted against what the engine then holds (docs/exactness.md).

Where there is a renderer, a sample is also compared with what that makes of the same request.

A sample is taken after the answer went out, so no client waits for it. Which requests are sampled follows from their id
alone: the same request is sampled or not, whoever asks. Work is bounded, and so are the bytes that wait for it: samples
that find no room are dropped and counted.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import orjson
from xxhash import xxh3_64_intdigest

from mmrouter_router.explain.decisions import Trace
from mmrouter_router.explain.evidence import Verdict, judge
from mmrouter_router.explain.rendering import Prompt, Rendering, compare, predicted_prompt
from mmrouter_router.fleet.feed_client import Feed
from mmrouter_router.fleet.workers import Fleet
from mmrouter_router.request.prepare import Prepared
from mmrouter_router.request.renderer_client import Renderer, RendererError
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.parity")

QUEUE = 256
COMPARERS = 4
RENDERINGS = 64
RENDERERS_ASKED = 2
HELD_BYTES = 64 << 20
"""Bodies with their images, and prompts, that are held for renderers at most."""
EVENTS_SECONDS = 10.0
"""How long after its answer a request's blocks may take to arrive: a busy SGLang publishes only every 40 decode steps
(docs/engine-facts/sglang.md#block-size-and-timing)."""


class Sampler:
    """Takes samples and compares them in the background."""

    def __init__(
        self,
        ratio: float,
        fleet: Fleet,
        feed_of: Callable[[str], Feed | None],
        metrics: Metrics,
        *,
        seconds: float = EVENTS_SECONDS,
        queue: int = QUEUE,
    ) -> None:
        """``ratio`` is ``spec.verification.sampleRatio``, 0 to 1; ``feed_of`` finds a worker's feed by its pod uid."""
        self._threshold = int(ratio * 2**64)
        self._fleet, self._feed_of, self._metrics, self._seconds = fleet, feed_of, metrics, seconds
        self._queue: asyncio.Queue[Trace] = asyncio.Queue(queue)

    def wants(self, request_id: str) -> bool:
        """Whether this request is one of the share."""
        return xxh3_64_intdigest(request_id.encode()) < self._threshold

    def offer(self, trace: Trace) -> None:
        """Take an answered request, where it is of the share and something was predicted. Never waits."""
        if trace.expected is None or not self.wants(trace.request_id):
            return
        try:
            self._queue.put_nowait(trace)
        except asyncio.QueueFull:
            self._metrics.parity_dropped.inc()

    async def run(self) -> None:
        """Compare until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(COMPARERS):
                tasks.create_task(self._compare_all())

    async def _compare_all(self) -> None:
        while True:
            trace = await self._queue.get()
            trace.parity = await self.compare(trace)

    async def judge(self, trace: Trace, *, seconds: float) -> Verdict | None:
        """Compare one request without counting it; ``None`` where nothing was predicted."""
        expected = trace.expected
        if expected is None:
            return None
        return await judge(expected, self._fleet, self._feed_of(expected.worker), seconds=seconds)

    async def compare(self, trace: Trace) -> Verdict | None:
        """Judge one request and count the result."""
        verdict = await self.judge(trace, seconds=self._seconds)
        if verdict is None:
            return None
        self._metrics.parity.labels(verdict.result, verdict.cause).inc()
        if verdict.result == "False":
            said = verdict.difference.message if verdict.difference else ""
            log.warning("%s: not what was predicted: %s: %s", trace.request_id, verdict.cause, said)
        return verdict


@dataclass(frozen=True, slots=True)
class _Asked:
    """A sample that waits for a renderer: the body that the engine got, and what was predicted of it."""

    trace: Trace
    prompt: Prompt
    body: bytes

    @property
    def size(self) -> int:
        """Bytes held."""
        return len(self.body) + self.prompt.ids.itemsize * len(self.prompt.ids)


class RenderSampler:
    """Asks renderers for sampled requests whose prompts we predicted ourselves, in the background."""

    def __init__(
        self,
        wants: Callable[[str], bool],
        renderer: Renderer,
        metrics: Metrics,
        *,
        queue: int = RENDERINGS,
        held: int = HELD_BYTES,
    ) -> None:
        """``wants`` says by its id whether a request is sampled; ``held`` bounds the bytes of all that wait."""
        self._wants, self._renderer, self._metrics, self._room = wants, renderer, metrics, held
        self._queue: asyncio.Queue[_Asked] = asyncio.Queue(queue)

    def offer(self, trace: Trace, prepared: Prepared, body: Callable[[], bytes]) -> None:
        """Take an answered request, where it is of the share, with the body that has its images in it. Never waits."""
        if not self._wants(trace.request_id) or (prompt := predicted_prompt(prepared)) is None:
            return
        asked = _Asked(trace, prompt, body())
        if self._queue.full() or asked.size > self._room:
            self._metrics.parity_dropped.inc()
            return
        self._room -= asked.size
        self._queue.put_nowait(asked)

    async def run(self) -> None:
        """Ask and compare until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(RENDERERS_ASKED):
                tasks.create_task(self._compare_all())

    async def _compare_all(self) -> None:
        while True:
            asked = await self._queue.get()
            found = asked.trace.rendering = await self._compare(asked)
            self._metrics.parity.labels(found.result, found.cause).inc()
            if found.result == "False":
                log.warning("%s: not what a renderer makes of it: %s", asked.trace.request_id, found.message)
            self._room += asked.size
            del asked  # while this waits for the next one, nothing is held

    async def _compare(self, asked: _Asked) -> Rendering:
        try:
            ids, spans = await self._renderer.render(orjson.loads(asked.body))
        except RendererError as error:
            return Rendering("Unknown", 0, f"renderer_{error.cause}", str(error))
        return compare(asked.prompt, ids, spans)
