"""Images to encoders, as the scheduler says: the sending, and nothing of the choosing.

See docs/engine-facts/vllm.md#encoder-disaggregation.

Each image goes to its encoder alone, so an image that many requests show is encoded for all of them at once. The
encoder's answer is opaque: it comes back as it was, for the engine that needs the embedding.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmrouter_lib.engines.vllm.disaggregation import StageError, embedding_bytes, read_encoded
from mmrouter_router.encoding import Answer, Encoder, Encoders, Image, Outcome, Placed
from mmrouter_router.http.upstream import UpstreamError
from mmrouter_router.request.engine_request import OutgoingImage

log = logging.getLogger("mmrouter.encoding")

REFUSED = range(400, 500)
"""What an encoder answers to an image that no other one would take either."""
BUSY = frozenset({408, 429})
"""Of these, what is about the encoder and not about the image."""

Post = Callable[[str, OutgoingImage, Mapping[str, str], list[dict[str, Any]]], Awaitable[tuple[int, bytes]]]
"""Encoder id, image, trace context, and a list that gets how the image travelled -> status and answer.

Raises :class:`UpstreamError`.
"""


class EncodeError(Exception):
    """No encoder encodes a request's images; ``reason`` is one of few words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Shown:
    """One image of a request: what the scheduler weighs, and what an encoder is sent."""

    image: Image
    sent: OutgoingImage


@dataclass(frozen=True, slots=True)
class Encoded:
    """What encoders said of a request's images, by identity, and how it came about, in the order of the images."""

    params: dict[str, dict[str, Any]]
    placed: tuple[Placed, ...]
    seconds: float
    travelled: list[dict[str, Any]]
    """How the images that were sent reached their encoders."""


@dataclass(slots=True)
class _Waiting:
    """A request whose images are being encoded."""

    shown: tuple[Shown, ...]
    headers: Mapping[str, str]
    done: "asyncio.Future[tuple[Answer, ...]]" = field(default_factory=asyncio.Future)


class Encoding:
    """The encoders of this router's fleet. All methods are called from one event loop."""

    def __init__(self, machine: Encoders, post: Post, clock: Callable[[], float] = time.monotonic) -> None:
        self.machine = machine
        self._post, self._clock = post, clock
        self._waiting: dict[str, _Waiting] = {}
        self._sending: dict[int, asyncio.Task[None]] = {}
        self._joined: dict[str, Encoder] = {}  # by the id that the fleet knows
        self._times: Counter[str] = Counter()  # how often one came back
        self._changed = asyncio.Event()

    @property
    def able(self) -> bool:
        """Whether there is an encoder at all."""
        return bool(self._joined)

    def update(self, encoders: Collection[Encoder]) -> None:
        """Work with these encoders from now on. What one that is gone had goes to the others."""
        wanted = {encoder.id: encoder for encoder in encoders}
        before, self._joined = self._joined, wanted
        for name in before.keys() - wanted.keys():
            self._carry_out(self.machine.leave(self._known_as(name), self._clock()))
            self._times[name] += 1
        for name, encoder in wanted.items():
            if before.get(name) != encoder:
                self._carry_out(self.machine.join(replace(encoder, id=self._known_as(name)), self._clock()))

    def _known_as(self, name: str) -> str:
        """What the scheduler calls an encoder: one that comes back is another one to it, as it may have forgotten."""
        return f"{name}~{self._times[name]}" if self._times[name] else name

    async def encode(
        self, request_id: str, shown: Sequence[Shown], headers: Mapping[str, str] | None = None
    ) -> Encoded:
        """Have every image encoded; a call that is cancelled takes back what only it wanted.

        ``headers``: the request's trace context. An image that several requests wait for is in the first one's trace.
        Raises :class:`EncodeError` when no encoder does it.
        """
        began = self._clock()
        waiting = self._waiting[request_id] = _Waiting(tuple(shown), headers or {})
        try:
            outcome = self.machine.place(request_id, [one.image for one in shown], began)
            if outcome.full is not None:
                raise EncodeError("encoders_full")
            self._carry_out(outcome)
            answers = await waiting.done
        finally:
            del self._waiting[request_id]
            self._carry_out(self.machine.cancel(request_id, self._clock()))
        params = {one.sent.uuid: answer.value[0] for one, answer in zip(shown, answers, strict=True)}
        # What an encoder had already travelled to it for another request.
        fresh = [a.value[1] for a, placed in zip(answers, outcome.placed, strict=True) if placed.how == "queued"]
        return Encoded(params, outcome.placed, self._clock() - began, [told for one in fresh for told in one])

    async def run(self) -> None:
        """Take work away from encoders that stall; ends only by cancellation, and ends what is being sent."""
        try:
            while True:
                now = self._clock()
                due = self.machine.next_tick(now)
                self._changed.clear()
                try:
                    async with asyncio.timeout(None if due == float("inf") else max(0.0, due - now)):
                        await self._changed.wait()
                except TimeoutError:
                    self._carry_out(self.machine.tick(self._clock()))
        finally:
            for task in self._sending.values():
                task.cancel()

    # -- what the scheduler says ------------------------------------------------------------------------------------

    def _carry_out(self, outcome: Outcome) -> None:
        for abort in outcome.aborts:
            if task := self._sending.pop(abort.run, None):
                task.cancel()
        for start in outcome.starts:
            task = asyncio.create_task(self._send(start.run, start.encoder, start.image), name=f"encode {start.run}")
            self._sending[start.run] = task
        for ready in outcome.ready:
            if (waiting := self._waiting.get(ready.request)) and not waiting.done.done():
                waiting.done.set_result(ready.answers)
        for lost in outcome.lost:
            if (waiting := self._waiting.get(lost.request)) and not waiting.done.done():
                waiting.done.set_exception(EncodeError(lost.reason))
        self._changed.set()

    async def _send(self, job: int, encoder: str, image: Image) -> None:
        sent, headers = self._asked(image)
        refused = False
        travelled: list[dict[str, Any]] = []
        try:
            status, raw = await self._post(encoder.partition("~")[0], sent, headers, travelled)
            refused = status in REFUSED and status not in BUSY
            if status != 200:
                raise StageError(f"answered {status}: {raw[:200].decode(errors='replace')}")
            params = read_encoded(raw, [sent.uuid])[sent.uuid]
        except (StageError, UpstreamError) as error:
            log.warning("encoder %s: %s", encoder, error)
            self._sending.pop(job, None)
            self._carry_out(self.machine.failed(job, self._clock(), refused=refused))
            return
        self._sending.pop(job, None)
        self._carry_out(self.machine.finished(job, self._clock(), (params, travelled), embedding_bytes(params)))

    def _asked(self, image: Image) -> tuple[OutgoingImage, Mapping[str, str]]:
        """What is sent for an image, and in whose trace: any request's that shows it, as equal keys are equal bytes."""
        for waiting in self._waiting.values():
            for shown in waiting.shown:
                if shown.image.key == image.key:
                    return shown.sent, waiting.headers
        raise AssertionError("an image that nobody waits for was started")
