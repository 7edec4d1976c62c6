"""Send a placed request to its engine; only before the first answer byte try another (docs/architecture.md)."""

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace

from mmrouter.api import EngineType
from mmrouter.engines import adapter
from mmrouter.engines.sglang_stages import failure_of as failure_of_sglang
from mmrouter_router.chain import WHOLE, Form
from mmrouter_router.decisions import Trace, trace_of
from mmrouter_router.errors import RequestError
from mmrouter_router.fleet import Target
from mmrouter_router.metrics import Metrics
from mmrouter_router.outgoing import CHAT, Outgoing
from mmrouter_router.pairs import Prefill, PrefillError, Refusal, choose
from mmrouter_router.place import Booking, Decision, NoWorkerError, Placer
from mmrouter_router.prepare import Prepared
from mmrouter_router.schedule import Policy
from mmrouter_router.stages import Note, Staged, Stages
from mmrouter_router.tracing import Span, failure_of, scheduled, stage
from mmrouter_router.upstream import Answer, Upstream, UpstreamError

ENGINE_PORT = 8000
DRAINING = b"cannot schedule new futures after shutdown"
"""What vLLM answers with status 500 while it drains (facts on vLLM 8.5)."""
ERROR_LIMIT = 256 * 1024
STAGE_LIMIT = 4 << 20
"""Of an answer that is for another engine: it lists the blocks of a prompt, and holds no text."""
DEATHS = 2
"""Engines that may end under one request before it is quarantined."""
QUARANTINE = 1024


class Quarantine:
    """Fingerprints of requests under which engines ended; bounded, oldest forgotten first."""

    def __init__(self, size: int = QUARANTINE) -> None:
        self._size = size
        self._bad: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, fingerprint: bytes) -> bool:
        return fingerprint in self._bad

    def add(self, fingerprint: bytes) -> None:
        """Refuse this request from now on."""
        self._bad[fingerprint] = None
        if len(self._bad) > self._size:
            self._bad.popitem(last=False)


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
    rest: AsyncIterator[bytes]
    span: Span
    half: Prefill | None = None
    """The other half of an answer that two engines give together."""

    def close(self) -> None:
        """End the booking and give the connection back (or drop it: the engine then aborts)."""
        self.booking.end()
        if self.half is not None:
            self.half.end(whole=self.answer.whole)
        self.answer.close()
        self.span.end()


class Forwarder:
    """Places and sends requests until one engine answers."""

    def __init__(
        self,
        placer: Placer,
        upstream: Upstream,
        engine_key: str,
        metrics: Metrics,
        *,
        engine: EngineType = "vllm",
        stages: Stages | None = None,
        sent: Callable[[Decision, Prepared], None] = lambda decision, prepared: None,
    ) -> None:
        """``sent`` is called with every request right before it goes to an engine.

        ``stages``: what is done before an engine answers; ``None``: nothing.
        """
        self._placer, self._upstream, self._metrics, self._sent = placer, upstream, metrics, sent
        self._stages = stages
        self._request_id_header: str = getattr(adapter(engine), "REQUEST_ID_HEADER", "x-request-id")
        self._authorization = f"Bearer {engine_key}"
        self.quarantine = Quarantine()

    async def send(
        self,
        request_id: str,
        prepared: Prepared,
        outgoing: Outgoing,
        fingerprint: bytes,
        headers: Mapping[str, str],
        policy: Policy | None = None,
    ) -> Reply:
        """Return the first answer that is not a retryable refusal.

        Raises :class:`RequestError` (503 with ``Retry-After``) when nobody can take the request, and a 400 when two
        engines ended under it.
        """
        if fingerprint in self.quarantine:
            self._metrics.quarantined.inc()
            raise RequestError.quarantined()
        tried: set[str] = set()
        failed: set[str] = set()  # prefill engines of pairs
        deaths = 0
        alone = moved = False
        trace: Trace | None = None
        while True:
            shape = self._stages.form() if self._stages is not None else WHOLE
            with stage("schedule") as told:
                computes: Decision | None = None
                try:
                    if shape.paired:
                        decision, computes = choose(
                            self._placer, prepared, shape.answers, tried=tried, failed=failed, policy=policy
                        )
                    else:
                        decision = self._placer.place(prepared, exclude=tried, policy=policy, roles=shape.answers)
                except NoWorkerError as error:
                    self._gone_without(shape)
                    raise RequestError.no_worker(str(error)) from error
                if told:
                    told.tell(scheduled(decision))
            tried.add(decision.target.worker.member.uid)
            booking = self._placer.begin(decision)
            staged: Staged | None = None
            if computes is not None:
                booking.answered()
            elif self._stages is not None and shape.staged and outgoing.path == CHAT:
                try:
                    staged = await self._stages.before(
                        request_id, prepared, outgoing, shape, decision, headers, alone=alone
                    )
                except BaseException:  # a client that leaves, too: nobody else would end the booking
                    booking.end()
                    raise
                if staged.prefilled is not None:
                    booking.answered()
                deaths += staged.lost
            computed = computes or (staged.prefilled if staged else None) or decision
            fresh = trace_of(request_id, prepared, computed)
            fresh.attempts, fresh.chain = (trace.attempts, trace.chain) if trace else ([], [])
            if staged is not None:
                fresh.chain += [note.as_json() for note in staged.notes]
            if staged is not None or computes is not None:
                fresh.answers = decision.target.worker.member.name
            fresh.form, fresh.degraded = shape.name, shape.degraded
            trace = fresh
            self._sent(computed, prepared)
            if deaths >= DEATHS:
                booking.end()
                self.quarantine.add(fingerprint)
                self._metrics.quarantined.inc()
                raise RequestError.quarantined()
            span = stage("engine", client=True)
            if span:
                span.tell({"mmrouter.worker": decision.target.worker.member.name, "mmrouter.attempt": len(tried)})
            half: Prefill | None = None
            sent = time.monotonic()
            try:
                body = staged.body if staged is not None else outgoing.plain
                if computes is not None:
                    half = self._prefill(computes, request_id, outgoing, headers)
                exchange = self._exchange(decision, trace, booking, outgoing.path, body, headers, span, half)
                reply = await (exchange if half is None else half.beside(exchange, _drop))
                retry = await self._refused(reply)
            except PrefillError as error:
                assert half is not None
                self._noted(trace, half.note(error.cause))
                trace.tried(half.decision, f"{error.cause}: {error}")
                span.fail(error.cause)
                if error.refusal is not None:
                    refusal = error.refusal
                    return Reply(half.decision, trace, booking, refusal, refusal.body, _nothing(), span)
                booking.end()
                span.end()
                self._metrics.retries.labels(error.cause).inc()
                deaths += error.died
                if deaths >= DEATHS:
                    self.quarantine.add(fingerprint)
                    self._metrics.quarantined.inc()
                    raise RequestError.quarantined() from error
                failed.add(half.decision.target.worker.member.uid)
                tried.discard(decision.target.worker.member.uid)  # it did nothing wrong, and waits for nobody now
                continue
            except UpstreamError as error:
                if half is not None:
                    half.end()
                booking.end()
                cause = "engine_lost" if error.sent else "connect"
                trace.tried(decision, f"{cause}: {error}")
                self._metrics.retries.labels(cause).inc()
                span.fail(cause)
                span.end()
                deaths += error.sent
                if deaths >= DEATHS:
                    self.quarantine.add(fingerprint)
                    self._metrics.quarantined.inc()
                    raise RequestError.quarantined() from error
                continue
            except BaseException as error:
                if half is not None:
                    half.end()
                booking.end()
                span.fail(failure_of(error))
                span.end()
                raise
            if retry is None and staged is not None and staged.prefilled is not None and reply.answer.status >= 500:
                # What the prefill held may be gone: the same engine computes the prompt, or another does.
                retry, alone = "transfer", True
                tried.discard(decision.target.worker.member.uid)
            if half is not None and (failure := failure_of_sglang(reply.answer.status, reply.first)) is not None:
                half.end()
                if retry is None and failure.status >= 500 and not moved:
                    # Its partner may have failed it, and be seen to be gone a moment later.
                    retry, moved = "transfer", True
                    tried.discard(decision.target.worker.member.uid)
            if retry is None:
                trace.tried(decision, f"answered {reply.answer.status}")
                self._gone_without(shape)
                if half is not None and reply.answer.status < 400:
                    self._noted(trace, half.note("done"))
                    answers = (decision.target.worker.member.name,)
                    trace.chain.append(Note("answer", "first_byte", answers, time.monotonic() - sent).as_json())
                if self._stages is not None and staged is not None and reply.answer.status < 400:
                    last = self._stages.answered(staged, decision.target.worker.member.name)
                    trace.chain.append(last.as_json())
                return replace(reply, decision=computed)
            span.fail(retry)
            reply.close()
            trace.tried(decision, retry)
            self._metrics.retries.labels(retry).inc()

    def _gone_without(self, shape: Form) -> None:
        """Count a request once, when it is clear which pools it had to do without."""
        for missing in shape.degraded:
            self._metrics.degraded.labels(missing).inc()

    async def _exchange(
        self,
        decision: Decision,
        trace: Trace,
        booking: Booking,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        span: Span,
        half: Prefill | None = None,
    ) -> Reply:
        target = decision.target
        own = self._own(target, trace.request_id) | (half.told(target) if half is not None else {})
        answer = await self._upstream.request(
            target.worker.member.ip, ENGINE_PORT, "POST", path, {**span.passed_on(headers), **own}, body
        )
        rest = answer.body()
        try:
            # An engine sends its headers before it computes: only a body byte shows that it lives.
            first = await anext(rest, b"")
        except BaseException:
            answer.close()
            raise
        booking.answered()
        if span:
            span.event("first byte")
            span.tell({"http.response.status_code": answer.status})
        return Reply(decision, trace, booking, answer, first, rest, span, half)

    def _prefill(self, decision: Decision, request_id: str, outgoing: Outgoing, headers: Mapping[str, str]) -> Prefill:
        """Send a request to the engine that computes its prompt, while another one answers it."""

        async def send(target: Target, told: Mapping[str, str]) -> Answer:
            own = {**told, **self._own(target, request_id)}
            return await self._upstream.request(
                target.worker.member.ip, ENGINE_PORT, "POST", outgoing.path, own, outgoing.plain
            )

        return Prefill(decision, self._placer.begin(decision), send, headers)

    def _noted(self, trace: Trace, note: Note) -> None:
        trace.chain.append(note.as_json())
        if self._stages is not None:
            self._stages.count(note)

    async def ask(
        self, target: Target, request_id: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Send a stage of a request to an engine; returns status and whole answer. Raises :class:`UpstreamError`."""
        own = self._own(target, request_id)
        answer = await self._upstream.request(
            target.worker.member.ip, ENGINE_PORT, "POST", path, {**headers, **own}, body
        )
        try:
            return answer.status, await answer.read(STAGE_LIMIT)
        finally:
            answer.close()

    def _own(self, target: Target, request_id: str) -> dict[str, str]:
        """Headers of ours, over which a client has no say."""
        own = {
            "content-type": "application/json",
            "authorization": self._authorization,
            self._request_id_header: request_id,
            "accept-encoding": "identity",
        }
        if target.worker.ranks > 1:
            own["x-data-parallel-rank"] = str(target.rank)
        return own

    @staticmethod
    async def _refused(reply: Reply) -> str | None:
        """Return why another worker should be asked, or ``None``."""
        if reply.answer.status == 503:
            return "busy"
        if reply.answer.status == 500:
            body = reply.first
            try:
                async for piece in reply.rest:
                    body += piece
                    if len(body) > ERROR_LIMIT:
                        break
            except BaseException:  # broken off or cancelled: nobody else will give the connection back
                reply.close()
                raise
            reply.first = body
            if DRAINING in body:
                return "draining"
        return None


def _drop(reply: Reply) -> None:
    """Cut a connection whose answer nobody gets; the booking is ended where it was begun."""
    reply.answer.close()


async def _nothing() -> AsyncIterator[bytes]:
    """What follows an answer that is there whole."""
    return
    yield b""
