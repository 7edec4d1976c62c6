"""Client of a deployment's engines: headers, and answers up to their first byte."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.answer_takeover import ContinuationError
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.core.errors import RequestError
from mmrouter_router.dispatch.sglang_pair import PrefillHalf, PrefillRefusal
from mmrouter_router.explain.decisions import DecisionTrace
from mmrouter_router.fleet.workers import Target, Worker
from mmrouter_router.http.engine_connection import Body
from mmrouter_router.http.gateway import Gateway, GatewayAnswer
from mmrouter_router.http.upstream import Answer, Upstream
from mmrouter_router.request.prepared import Outgoing
from mmrouter_router.scheduling.placer import Booking, Decision
from mmrouter_router.streams.answer import StreamedAnswer
from mmrouter_router.telemetry.tracing import Span

DRAINING = b"cannot schedule new futures after shutdown"  # with status 500 (docs/engine-facts/vllm.md#drain)
ERROR_LIMIT = 256 * 1024
EVENTS: Final = b"text/event-stream"
HELD_BYTES: Final = 256 * 1024  # size up to which an answer of known length is held until it is complete
RENDERED_LIMIT: Final = 256 << 20  # bytes of a rendered prompt, which holds the pixels of its images
MAX_INCOMPLETE: Final = 4  # tokens at the end of an answer that form no character: one has at most four bytes
SEAM_TOKENS: Final = 8  # tokens whose text shows whether the last character is whole
STAGE_LIMIT = 4 << 20  # bytes of an answer for another engine: it lists the blocks of a prompt, and holds no text


@dataclass
class EngineReply:
    """An engine's answer whose first bytes are there. Call ``close`` in every case.

    ``decision``: on the engine that computed the prompt, which is the one that answers unless another prefilled it.
    ``half``: the prefill engine's half of an answer by a pair.
    """

    decision: Decision
    trace: DecisionTrace
    booking: Booking
    answer: Answer | GatewayAnswer | PrefillRefusal
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

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return self.status == 200 and _holds_events(self.answer)

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
        """Send a request; its answer may not have begun. Raises :class:`UpstreamError`."""
        own = self._headers(target, request_id, headers)
        return await self._upstream.request(target.worker.member.ip, HTTP_PORT, "POST", path, own, body)

    async def ask_about(self, worker: Worker, method: str, path: str) -> Answer:
        """Send a request without a body about what an engine stores. Raises :class:`UpstreamError`."""
        headers = {"authorization": self._authorization, "accept-encoding": "identity"}
        return await self._upstream.request(worker.member.ip, HTTP_PORT, method, path, headers)

    def _headers(self, target: Target, request_id: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return a request's headers: the router's override ``headers`` but a content type."""
        own = {
            "content-type": headers.get("content-type", "application/json"),
            "authorization": self._authorization,
            self._request_id_header: request_id,
            "accept-encoding": "identity",
        }
        if target.worker.ranks > 1:
            own["x-data-parallel-rank"] = str(target.rank)
        return {**headers, **own}

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
        """Send a request and wait for the first byte of its answer, or all of a small one. Raises UpstreamError.

        ``headers``: with the context of ``span``.
        """
        target = decision.target
        answer = await self.post(target, trace.request_id, path, body, headers)
        try:
            # An engine sends its headers before it computes: only a body byte shows that it works.
            first = await answer.piece()
            first += await _rest_of_small(answer, len(first))
        except BaseException:  # broken or cancelled: the caller has no answer to close yet
            answer.close()
            raise
        return _replied(EngineReply(decision, trace, booking, answer, first, span, half))

    async def reply_through(
        self,
        gateway: Gateway,
        decision: Decision,
        trace: DecisionTrace,
        booking: Booking,
        path: str,
        body: Body,
        headers: Mapping[str, str],
        span: Span,
    ) -> EngineReply:
        """Let a gateway send a request; return at the first byte of the answer, of which nothing is held.

        Raises :class:`UpstreamError`.
        """
        target = decision.target
        own = self._headers(target, trace.request_id, headers)
        answer = await gateway.request(target.worker.member.ip, HTTP_PORT, "POST", path, own, body)
        return _replied(EngineReply(decision, trace, booking, answer, await answer.piece(), span))

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
                try:
                    sent.drop_last_id()
                except ValueError as error:
                    raise ContinuationError(str(error), "logprobs") from error
            else:
                raise ContinuationError("the answer does not end with a complete character")
            rendered = _body_of(
                await ask(way.prompt_paths[outgoing.path], await outgoing.whole(), limit=RENDERED_LIMIT)
            )
            body = await asyncio.to_thread(way.build, rendered, tuple(sent.ids))
        except ContinuationError as error:
            raise RequestError(502, str(error), type="server_error", code=error.obstacle or "engine_refused") from error
        return await self.reply(decision, trace, booking, way.generate_path, body, span.propagate(headers), span)


def _replied(reply: EngineReply) -> EngineReply:
    """Note that an answer has begun."""
    reply.booking.answered()
    if reply.span:
        reply.span.event("first byte")
        reply.span.set_attributes({"http.response.status_code": reply.status})
    return reply


def _holds_events(answer: Answer | GatewayAnswer | PrefillRefusal) -> bool:
    return any(name == b"content-type" and value.startswith(EVENTS) for name, value in answer.headers)


async def _rest_of_small(answer: Answer, received: int) -> bytes:
    """Return the missing bytes of a small answer of a known length, so that a break before its end can be retried.

    A stream of events is not held, even if the engine declares its length: the client gets each event as it arrives.
    """
    if answer.complete or _holds_events(answer):
        return b""
    length = next((int(value) for name, value in answer.headers if name == b"content-length"), HELD_BYTES + 1)
    return b"" if length > HELD_BYTES else await answer.read(length - received)


def _body_of(answer: tuple[int, bytes]) -> bytes:
    status, body = answer
    if status != 200:
        raise ContinuationError(f"the engine answered {status}")
    return body
