"""Send images to encoders as the scheduler decides (docs/engine-facts/vllm.md#encoder-disaggregation).

Each image is sent alone, so an image of many requests is encoded once for all of them. The encoder's answer is opaque:
it is passed unchanged to the engine that needs the embedding.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmrouter_lib.engines.vllm.stage_requests import StageError, embedding_bytes, read_encoded
from mmrouter_router.encoding.encoder_queue import Encoder, Image, ImagePlacement, Outcome
from mmrouter_router.encoding.scheduler import EncoderScheduler
from mmrouter_router.http.upstream import UpstreamError
from mmrouter_router.request.prepared import OutgoingImage

log = logging.getLogger("mmrouter.encoding")

REFUSED = range(400, 500)  # statuses for an image that every other encoder would refuse, too
BUSY = frozenset({408, 429})  # of these, those that are about the encoder and not about the image

Post = Callable[[str, OutgoingImage, Mapping[str, str], list[dict[str, Any]]], Awaitable[tuple[int, bytes]]]
"""Encoder id, image, trace context, and a list that gets the image's transfers -> status and answer.

Raises :class:`UpstreamError`.
"""


class EncodeError(Exception):
    """No encoder encodes a request's images; ``reason`` is a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ImageToEncode:
    """One image of a request: its size for the scheduler, and what an encoder is sent."""

    image: Image
    sent: OutgoingImage


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """Encoders' answers by image identity, placements in the order of the images, and the transfers to encoders."""

    params: dict[str, dict[str, Any]]
    placed: Sequence[ImagePlacement]
    seconds: float
    transfers: list[dict[str, Any]]


@dataclass(slots=True)
class _Waiting:
    images: tuple[ImageToEncode, ...]
    headers: Mapping[str, str]
    done: "asyncio.Future[tuple[Any, ...]]" = field(default_factory=asyncio.Future)


class ImageSender:
    """Encodes images of requests at the fleet's encoders. All methods are called from one event loop."""

    def __init__(self, scheduler: EncoderScheduler, post: Post, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler = scheduler
        self._post, self._clock = post, clock
        self._waiting: dict[str, _Waiting] = {}
        self._sending: dict[int, asyncio.Task[None]] = {}
        self._joined: dict[str, Encoder] = {}  # by the fleet's id
        self._departures: Counter[str] = Counter()
        self._changed = asyncio.Event()

    @property
    def able(self) -> bool:
        return bool(self._joined)

    def update(self, encoders: Collection[Encoder]) -> None:
        """Set the encoders, whose bounds never change. Work of one that is gone goes to the others."""
        wanted = {encoder.id: encoder for encoder in encoders}
        before, self._joined = self._joined, wanted
        for name in before.keys() - wanted.keys():
            self._carry_out(self.scheduler.leave(self._scheduler_id(name), self._clock()))
            self._departures[name] += 1
        for name, encoder in wanted.items():
            if name not in before:
                self._carry_out(self.scheduler.join(replace(encoder, id=self._scheduler_id(name)), self._clock()))

    def _scheduler_id(self, name: str) -> str:
        """An encoder that comes back gets a new id, because its cache may be empty."""
        return f"{name}~{self._departures[name]}" if self._departures[name] else name

    async def encode(
        self, request_id: str, images: Sequence[ImageToEncode], headers: Mapping[str, str] | None = None
    ) -> EncodedImages:
        """Encode every image; a cancelled call withdraws the images that only it needs.

        ``headers``: the request's trace context. An image of several requests belongs to the trace of the first.
        Raises :class:`EncodeError` when the encoders fail.
        """
        began = self._clock()
        waiting = self._waiting[request_id] = _Waiting(tuple(images), headers or {})
        try:
            outcome = self.scheduler.place(request_id, [each.image for each in images], began)
            if outcome.full:
                raise EncodeError("encoders_full")
            self._carry_out(outcome)
            answers = await waiting.done
        finally:
            del self._waiting[request_id]
            self._carry_out(self.scheduler.cancel(request_id, self._clock()))
        params = {each.sent.uuid: answer[0] for each, answer in zip(images, answers, strict=True)}
        # A held or joined image was transferred for another request.
        fresh = [answer[1] for answer, placed in zip(answers, outcome.placed, strict=True) if placed.how == "queued"]
        return EncodedImages(params, outcome.placed, self._clock() - began, [entry for one in fresh for entry in one])

    async def run(self) -> None:
        try:
            while True:
                now = self._clock()
                due = self.scheduler.next_tick(now)
                self._changed.clear()
                try:
                    async with asyncio.timeout(None if due == float("inf") else max(0.0, due - now)):
                        await self._changed.wait()
                except TimeoutError:
                    self._carry_out(self.scheduler.tick(self._clock()))
        finally:
            for task in self._sending.values():
                task.cancel()

    def _carry_out(self, outcome: Outcome) -> None:
        for run in outcome.aborts:
            if task := self._sending.pop(run, None):
                task.cancel()
        for start in outcome.starts:
            task = asyncio.create_task(self._send(start.run, start.encoder, start.image), name=f"encode {start.run}")
            self._sending[start.run] = task
        for request, answers in outcome.ready.items():
            if (waiting := self._waiting.get(request)) and not waiting.done.done():
                waiting.done.set_result(answers)
        for request, reason in outcome.failed.items():
            if (waiting := self._waiting.get(request)) and not waiting.done.done():
                waiting.done.set_exception(EncodeError(reason))
        self._changed.set()

    async def _send(self, run: int, encoder: str, image: Image) -> None:
        sent, headers = self._find(image)
        refused = False
        transfers: list[dict[str, Any]] = []
        try:
            status, raw = await self._post(encoder.partition("~")[0], sent, headers, transfers)
            refused = status in REFUSED and status not in BUSY
            if status != 200:
                raise StageError(f"answered {status}: {raw[:200].decode(errors='replace')}")
            params = read_encoded(raw, [sent.uuid])[sent.uuid]
        except (StageError, UpstreamError) as error:
            log.warning("encoder %s: %s", encoder, error)
            self._sending.pop(run, None)
            self._carry_out(self.scheduler.failed(run, self._clock(), refused=refused))
            return
        self._sending.pop(run, None)
        self._carry_out(self.scheduler.finished(run, self._clock(), (params, transfers), embedding_bytes(params)))

    def _find(self, image: Image) -> tuple[OutgoingImage, Mapping[str, str]]:
        """Return the image and trace context of the first request with this key: equal keys are equal bytes."""
        for waiting in self._waiting.values():
            for each in waiting.images:
                if each.image.key == image.key:
                    return each.sent, waiting.headers
        raise AssertionError("the scheduler started an image of no waiting request")
