"""Client of a deployment's engines: headers, answers up to their first byte, and requests to a pair of SGLang's.

The prefill and the decode engine of a pair get a request at once (docs/engine-facts/sglang.md#prefill-decode). The
decode engine answers the client; the prefill engine's answer is read to its end and dropped. Each engine waits for the
other, so when one fails, the request at the other one is aborted.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.continuation import ContinuationError
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.sglang.stage_requests import decode_headers, failure_of, new_meeting, prefill_headers
from mmrouter_router.core.errors import RequestError
from mmrouter_router.dispatch.stages import PREFILL_SECONDS, StageReport
from mmrouter_router.explain.decisions import DecisionTrace
from mmrouter_router.fleet.workers import Target
from mmrouter_router.http.upstream import Answer, Body, Sink, Upstream, UpstreamError
from mmrouter_router.request.prepared import Outgoing, Prepared
from mmrouter_router.scheduling.placer import Booking, Decision, NoWorkerError, Placer
from mmrouter_router.scheduling.scoring import Policy
from mmrouter_router.streams.answer import StreamedAnswer
from mmrouter_router.telemetry.tracing import Span, child_span

KEPT_BYTES: Final = 256 * 1024  # bytes of a prefill engine's answer that are kept: enough for any error
DRAIN_SECONDS: Final = 10.0  # time for a prefill engine's answer to end after the client's
ENGINE_BUSY: Final = frozenset({408, 429})  # statuses below 500 that are about the engine and not about the request

T = TypeVar("T")
SendRequest = Callable[[Target, Mapping[str, str]], Awaitable[Answer]]
"""Target and headers -> answer, of one and the same request. Raises :class:`UpstreamError`."""
DRAINING = b"cannot schedule new futures after shutdown"  # with status 500 (docs/engine-facts/vllm.md#drain)
ERROR_LIMIT = 256 * 1024
HELD_BYTES: Final = 256 * 1024  # size up to which an answer of known length is held until it is complete
RENDERED_LIMIT: Final = 256 << 20  # bytes of a rendered prompt, which holds the pixels of its images
MAX_INCOMPLETE: Final = 4  # tokens at the end of an answer that form no character: one has at most four bytes
SEAM_TOKENS: Final = 8  # tokens whose text shows whether the last character is whole
STAGE_LIMIT = 4 << 20  # bytes of an answer for another engine: it lists the blocks of a prompt, and holds no text


@dataclass(frozen=True)
class PrefillRefusal:
    """A prefill engine's error that the client gets: the request is at fault. Stands in for an ``Answer``."""

    status: int
    body: bytes
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    complete: bool = True

    async def piece(self) -> bytes:
        return b""

    def remaining(self) -> bytes:
        return b""

    async def pour(self, sink: Sink) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Release nothing: the answer has been read."""


class PrefillError(Exception):
    """A prefill engine failed before the answer began. ``died``: the engine ended. ``code``: its span's error code."""

    def __init__(
        self, cause: str, message: str, *, died: bool = False, refusal: PrefillRefusal | None = None, code: str = ""
    ) -> None:
        """``cause``: a metric label."""
        super().__init__(message)
        self.cause, self.died, self.refusal, self.code = cause, died, refusal, code or cause


class PrefillHalf:
    """A prefill engine's half of one request, sent on construction. Call ``end`` in every case.

    ``seconds``: timeout for a first result of either half.
    """

    def __init__(
        self,
        decision: Decision,
        booking: Booking,
        send: SendRequest,
        headers: Mapping[str, str],
        seconds: float = PREFILL_SECONDS,
    ) -> None:
        self.decision, self._booking, self._timeout = decision, booking, seconds
        target = decision.target
        self._meeting = new_meeting(target.worker.member.ip, target.rank, target.worker.ranks)
        self._began = time.monotonic()
        self._seconds: float | None = None
        self._task = asyncio.create_task(self._compute(send, headers), name=f"prefill {target.worker.member.name}")
        self._task.add_done_callback(self._done)

    def decode_headers(self, target: Target) -> dict[str, str]:
        """Return the headers by which the decode engine finds this half."""
        return decode_headers(self._meeting, target.rank, target.worker.ranks)

    async def beside(self, answering: Coroutine[Any, Any, T], drop: Callable[[T], None]) -> T:
        """Await the decode engine's half; abort it and raise :class:`PrefillError` when this one fails.

        ``drop`` is called with a result that is not returned.
        """
        work = asyncio.create_task(answering)
        try:
            halves = (work, self._task)
            done, _ = await asyncio.wait(halves, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self.end()
                raise PrefillError("timeout", f"no answer within {self._timeout:g} s")
            if not work.done():
                self._task.result()
                await asyncio.wait((work,))
            return work.result()
        except BaseException:  # cancelled or failed: the other half's answer is unused
            work.cancel()
            (unused,) = await asyncio.gather(work, return_exceptions=True)
            if not isinstance(unused, BaseException):
                drop(unused)
            raise

    def report(self, outcome: str) -> StageReport:
        """Return the report of this half. It is done at the latest when the decode engine has its blocks."""
        winner = self.decision.choice.winner
        seconds = self._seconds if self._seconds is not None else time.monotonic() - self._began
        detail = {"overlap": winner.overlap, "blocks": winner.blocks, "why": self.decision.choice.reason}
        return StageReport("prefill", outcome, (winner.name,), seconds, detail)

    def end(self, *, whole: bool = False) -> None:
        """Release this half. ``whole``: the client has its answer, so this one may end within :data:`DRAIN_SECONDS`."""
        if self._task.done():
            return
        if whole:
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._task.cancel)
        else:
            self._task.cancel()
            self._booking.end()

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._seconds = time.monotonic() - self._began
        self._booking.end()
        if not task.cancelled():
            task.exception()  # mark as retrieved: the caller may have gone

    async def _compute(self, send: SendRequest, headers: Mapping[str, str]) -> None:
        target = self.decision.target
        with child_span("prefill", client=True) as span:
            span.set_attributes({"mmrouter.worker": target.worker.member.name})
            try:
                answer = await send(target, {**span.propagate(headers), **prefill_headers(self._meeting)})
                try:
                    text = b""
                    async for piece in answer.body():
                        text += piece if len(text) < KEPT_BYTES else b""
                finally:
                    answer.close()
            except UpstreamError as error:
                cause = "engine_lost" if error.sent else "connect"
                raise PrefillError(cause, str(error), died=error.sent) from error
            if (failure := failure_of(answer.status, text)) is not None:
                raise _refused(failure.status, failure.body)


def choose_pair(
    placer: Placer,
    prepared: Prepared,
    roles: Collection[str],
    *,
    tried: Collection[str] = (),
    failed: Collection[str] = (),
    policy: Policy | None = None,
    dry_run: bool = False,
) -> tuple[Decision, Decision | None]:
    """Return the decision for the answer, and for the prefill where that takes a pair. Raises :class:`NoWorkerError`.

    ``tried``: pods that may not answer, ``failed``: that may not prefill.
    """
    unpaired: set[str] = set()
    cause: NoWorkerError | None = None
    while True:
        try:
            decision = placer.place(prepared, exclude={*tried, *unpaired}, policy=policy, roles=roles, dry_run=dry_run)
        except NoWorkerError as error:
            raise cause or error from None
        worker = decision.target.worker
        if worker.member.role != "decode":
            return decision, None
        try:
            computes = placer.place(
                prepared, exclude=failed, policy=policy, roles=("prefill",), partner=worker, dry_run=dry_run
            )
        except NoWorkerError as error:
            cause = error
            unpaired.add(worker.member.uid)
        else:
            return decision, computes


def _refused(status: int, body: bytes) -> PrefillError:
    message, code = f"answered {status}", f"answered_{status}"
    if status < 500 and status not in ENGINE_BUSY:
        return PrefillError(code, message, refusal=PrefillRefusal(status, body))
    return PrefillError("busy" if status == 503 else "prefill", message, code=code)


@dataclass
class EngineReply:
    """An engine's answer whose first bytes are there. Call ``close`` in every case.

    ``decision``: on the engine that computed the prompt, which is the one that answers unless another prefilled it.
    ``half``: the prefill engine's half of an answer by a pair.
    """

    decision: Decision
    trace: DecisionTrace
    booking: Booking
    answer: Answer | PrefillRefusal
    first: bytes
    span: Span
    half: PrefillHalf | None = None

    def close(self) -> None:
        """End the booking and return the connection (or cut it: the engine then aborts)."""
        self.booking.end()
        if self.half is not None:
            self.half.end(whole=self.answer.complete)
        self.answer.close()
        self.span.end()

    def drop(self) -> None:
        """Cut the connection of an unused answer; the caller ends the booking."""
        self.answer.close()

    @property
    def status(self) -> int:
        return self.answer.status

    async def error_text(self) -> bytes:
        """Return the text of an error, which also becomes the answer's first bytes; empty for any other answer."""
        if self.answer.status < 400:
            return b""
        body = self.first
        try:
            while piece := await self.answer.piece():
                body += piece
                if len(body) > ERROR_LIMIT:
                    break
        except BaseException:  # broken or cancelled: the caller cannot close the reply any more
            self.close()
            raise
        self.first = body
        return body

    async def refusal(self) -> str | None:
        """Return why to try another worker, or ``None``."""
        if self.answer.status == 503:
            return "busy"
        if self.answer.status == 500 and DRAINING in await self.error_text():
            return "draining"
        return None


class EngineClient:
    """Sends requests to engines, with the headers that the router controls."""

    def __init__(self, upstream: Upstream, engine: EngineType, engine_key: str) -> None:
        self._upstream = upstream
        self._request_id_header = adapter(engine).request_id_header
        self.continuation = adapter(engine).continuation
        self._authorization = f"Bearer {engine_key}"

    async def post(self, target: Target, request_id: str, path: str, body: Body, headers: Mapping[str, str]) -> Answer:
        """Send a request; its answer may not have begun. The router's headers override ``headers``.

        Raises :class:`UpstreamError`.
        """
        own = {
            "content-type": "application/json",
            "authorization": self._authorization,
            self._request_id_header: request_id,
            "accept-encoding": "identity",
        }
        if target.worker.ranks > 1:
            own["x-data-parallel-rank"] = str(target.rank)
        return await self._upstream.request(target.worker.member.ip, HTTP_PORT, "POST", path, {**headers, **own}, body)

    async def reply(
        self,
        decision: Decision,
        trace: DecisionTrace,
        booking: Booking,
        path: str,
        body: Body,
        headers: Mapping[str, str],
        span: Span,
        half: PrefillHalf | None = None,
    ) -> EngineReply:
        """Send a request and wait for the first byte of its answer, or all of a small one. Raises UpstreamError."""
        target = decision.target
        pair_headers = half.decode_headers(target) if half is not None else {}
        answer = await self.post(target, trace.request_id, path, body, {**span.propagate(headers), **pair_headers})
        try:
            # An engine sends its headers before it computes: only a body byte shows that it works.
            first = await answer.piece()
            first += await _rest_of_small(answer, len(first))
        except BaseException:  # broken or cancelled: the caller has no answer to close yet
            answer.close()
            raise
        booking.answered()
        if span:
            span.event("first byte")
            span.set_attributes({"http.response.status_code": answer.status})
        return EngineReply(decision, trace, booking, answer, first, span, half)

    async def ask(
        self,
        target: Target,
        request_id: str,
        path: str,
        body: Body,
        headers: Mapping[str, str],
        *,
        limit: int = STAGE_LIMIT,
    ) -> tuple[int, bytes]:
        """Send a stage of a request; returns status and complete answer. Raises :class:`UpstreamError`."""
        answer = await self.post(target, request_id, path, body, headers)
        try:
            return answer.status, await answer.read(limit)
        finally:
            answer.close()

    async def continue_answer(
        self,
        decision: Decision,
        trace: DecisionTrace,
        booking: Booking,
        outgoing: Outgoing,
        sent: StreamedAnswer,
        headers: Mapping[str, str],
        span: Span,
    ) -> EngineReply:
        """Let an engine continue an answer from its token ids; return the stream of the tokens after them.

        Tokens at the end that form an incomplete character have no text yet, so they are generated again. Raises
        :class:`UpstreamError`, and :class:`RequestError` where the engine does not take the ids.
        """
        way = self.continuation
        assert way is not None, "answers are continued only where the engine can"
        ask = partial(self.ask, decision.target, trace.request_id, headers=headers)
        try:
            for _ in range(MAX_INCOMPLETE + 1):
                if not sent.ids:
                    break
                body = way.text_request(str(outgoing.fields["model"]), sent.ids[-SEAM_TOKENS:])
                if way.ends_whole(_body_of(await ask(way.text_path, body))):
                    break
                sent.drop_last_id()
            else:
                raise ContinuationError("the answer does not end with a complete character")
            rendered = _body_of(await ask(way.prompt_path, outgoing.plain, limit=RENDERED_LIMIT))
            body = await asyncio.to_thread(way.build, rendered, tuple(sent.ids))
        except ContinuationError as error:
            raise RequestError(502, str(error), type="server_error", code="engine_refused") from error
        return await self.reply(decision, trace, booking, way.generate_path, body, headers, span)


async def _rest_of_small(answer: Answer, received: int) -> bytes:
    """Return the missing bytes of a small answer of a known length, so that a break before its end can be retried."""
    if answer.complete:
        return b""
    length = next((int(value) for name, value in answer.headers if name == b"content-length"), HELD_BYTES + 1)
    return b"" if length > HELD_BYTES else await answer.read(length - received)


def _body_of(answer: tuple[int, bytes]) -> bytes:
    status, body = answer
    if status != 200:
        raise ContinuationError(f"the engine answered {status}")
    return body
