"""One exchange with one engine: what it is told besides the request, and its answer up to the first byte."""

from collections.abc import Mapping
from dataclasses import dataclass

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.dispatch.sglang_pair import Prefill, Refusal
from mmrouter_router.explain.decisions import Trace
from mmrouter_router.fleet.workers import Target
from mmrouter_router.http.upstream import Answer, Body, Upstream
from mmrouter_router.scheduling.placer import Booking, Decision
from mmrouter_router.telemetry.tracing import Span

DRAINING = b"cannot schedule new futures after shutdown"
"""What vLLM answers with status 500 while it drains (docs/engine-facts/vllm.md#drain)."""
ERROR_LIMIT = 256 * 1024
STAGE_LIMIT = 4 << 20
"""Of an answer that is for another engine: it lists the blocks of a prompt, and holds no text."""


@dataclass
class Reply:
    """An engine's answer whose first bytes are there. Call ``close`` in every case.

    ``decision``: on the engine that computed the prompt, which is the one that answers unless another prefilled it.
    """

    decision: Decision
    trace: Trace
    booking: Booking
    answer: Answer | Refusal
    first: bytes
    span: Span
    half: Prefill | None = None
    """The other half of an answer that two engines give together."""

    def close(self) -> None:
        """End the booking and give the connection back (or drop it: the engine then aborts)."""
        self.booking.end()
        if self.half is not None:
            self.half.end(whole=self.answer.complete)
        self.answer.close()
        self.span.end()

    def drop(self) -> None:
        """Cut the connection of an answer that nobody gets; the booking is ended where it was begun."""
        self.answer.close()

    @property
    def status(self) -> int:
        """The answer's status."""
        return self.answer.status

    async def said(self) -> bytes:
        """Return the text of an error, which is kept as the answer's first bytes; empty of any other answer."""
        if self.answer.status < 400:
            return b""
        body = self.first
        try:
            while piece := await self.answer.piece():
                body += piece
                if len(body) > ERROR_LIMIT:
                    break
        except BaseException:  # broken off or cancelled: nobody else will give the connection back
            self.close()
            raise
        self.first = body
        return body

    async def refusal(self) -> str | None:
        """Return why another worker should be asked, or ``None``."""
        if self.answer.status == 503:
            return "busy"
        if self.answer.status == 500 and DRAINING in await self.said():
            return "draining"
        return None


class Exchange:
    """Speaks with the engines of a deployment, each with the headers that are ours to say."""

    def __init__(self, upstream: Upstream, engine: EngineType, engine_key: str) -> None:
        self._upstream = upstream
        self._request_id_header = adapter(engine).request_id_header
        self._authorization = f"Bearer {engine_key}"

    async def post(self, target: Target, request_id: str, path: str, body: Body, headers: Mapping[str, str]) -> Answer:
        """Send a request; its answer may not have begun. ``headers`` have no say over ours.

        Raises :class:`UpstreamError`.
        """
        own = self._own(target, request_id)
        return await self._upstream.request(target.worker.member.ip, HTTP_PORT, "POST", path, {**headers, **own}, body)

    async def reply(
        self,
        decision: Decision,
        trace: Trace,
        booking: Booking,
        path: str,
        body: Body,
        headers: Mapping[str, str],
        span: Span,
        half: Prefill | None = None,
    ) -> Reply:
        """Send a request and wait for the first byte of its answer. Raises :class:`UpstreamError`."""
        target = decision.target
        told = half.told(target) if half is not None else {}
        answer = await self.post(target, trace.request_id, path, body, {**span.passed_on(headers), **told})
        try:
            # An engine sends its headers before it computes: only a body byte shows that it lives.
            first = await answer.piece()
        except BaseException:  # broken off or cancelled: nobody else has the answer yet
            answer.close()
            raise
        booking.answered()
        if span:
            span.event("first byte")
            span.tell({"http.response.status_code": answer.status})
        return Reply(decision, trace, booking, answer, first, span, half)

    async def ask(
        self, target: Target, request_id: str, path: str, body: Body, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Send a stage of a request to an engine; returns status and whole answer. Raises :class:`UpstreamError`."""
        answer = await self.post(target, request_id, path, body, headers)
        try:
            return answer.status, await answer.read(STAGE_LIMIT)
        finally:
            answer.close()

    def _own(self, target: Target, request_id: str) -> dict[str, str]:
        own = {
            "content-type": "application/json",
            "authorization": self._authorization,
            self._request_id_header: request_id,
            "accept-encoding": "identity",
        }
        if target.worker.ranks > 1:
            own["x-data-parallel-rank"] = str(target.rank)
        return own
