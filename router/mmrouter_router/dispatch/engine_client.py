"""HTTP client of a deployment's engines: the router's headers, and answers up to their first byte."""

from collections.abc import Mapping
from dataclasses import dataclass

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.dispatch.sglang_pair import PrefillHalf, PrefillRefusal
from mmrouter_router.explain.decisions import DecisionTrace
from mmrouter_router.fleet.workers import Target
from mmrouter_router.http.upstream import Answer, Body, Upstream
from mmrouter_router.scheduling.placer import Booking, Decision
from mmrouter_router.telemetry.tracing import Span

DRAINING = b"cannot schedule new futures after shutdown"
"""vLLM's error with status 500 while it drains (docs/engine-facts/vllm.md#drain)."""
ERROR_LIMIT = 256 * 1024
STAGE_LIMIT = 4 << 20
"""Bytes of an answer that is for another engine: it lists the blocks of a prompt, and holds no text."""


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
        """Send a request and wait for the first byte of its answer. Raises :class:`UpstreamError`."""
        target = decision.target
        pair_headers = half.decode_headers(target) if half is not None else {}
        answer = await self.post(target, trace.request_id, path, body, {**span.propagate(headers), **pair_headers})
        try:
            # An engine sends its headers before it computes: only a body byte shows that it works.
            first = await answer.piece()
        except BaseException:  # broken or cancelled: the caller has no answer to close yet
            answer.close()
            raise
        booking.answered()
        if span:
            span.event("first byte")
            span.set_attributes({"http.response.status_code": answer.status})
        return EngineReply(decision, trace, booking, answer, first, span, half)

    async def ask(
        self, target: Target, request_id: str, path: str, body: Body, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Send a stage of a request; returns status and complete answer. Raises :class:`UpstreamError`."""
        answer = await self.post(target, request_id, path, body, headers)
        try:
            return answer.status, await answer.read(STAGE_LIMIT)
        finally:
            answer.close()
