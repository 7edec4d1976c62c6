"""Send a request to its engine, and to another one if that engine ends before it answers (docs/architecture.md).

Streams that break later are continued by :mod:`.continued_stream`.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.base.passed_routes import GENERATE, PASSED_ROUTES
from mmrouter_lib.engines.sglang.stage_requests import MeetingFields, rank_field
from mmrouter_lib.engines.sglang.stage_requests import failure_of as failure_of_sglang
from mmrouter_router.core.errors import RequestError
from mmrouter_router.dispatch.engine_client import EngineClient, EngineReply
from mmrouter_router.dispatch.sglang_pair import PrefillError, PrefillHalf, choose_pair, half_of
from mmrouter_router.dispatch.stages import PREFILL_SECONDS, ForwardCall, StageReport, StageResult, Stages
from mmrouter_router.dispatch.waiting_line import WaitingLine
from mmrouter_router.explain.decisions import DecisionTrace, trace_of
from mmrouter_router.fleet.workers import Target, Worker
from mmrouter_router.handover.request_delivery import AddressedRequest, BytesDelivery, Delivery
from mmrouter_router.http.engine_connection import Body, UpstreamError
from mmrouter_router.http.gateway import Gateway
from mmrouter_router.http.upstream import Answer
from mmrouter_router.request.prepared import CHAT, Prepared
from mmrouter_router.scheduling.candidates import NoWorkerError
from mmrouter_router.scheduling.disaggregation import PipelineForm
from mmrouter_router.scheduling.placer import ANSWERING, Booking, Decision, Placer, QueueFullError, RouteNotServedError
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.tracing import Span, child_span, failure_of

DEATHS: Final = 2  # engines that may end under one request before it is quarantined
REMEMBERED: Final = 1024  # fingerprints of requests under which engines ended, oldest out first


@dataclass(slots=True)
class PlacedAttempt:
    """Decisions of one attempt. ``computes``: the prefill engine of a pair."""

    form: PipelineForm
    decision: Decision
    computes: Decision | None = None

    @property
    def answering(self) -> str:
        return self.decision.target.worker.member.uid

    @property
    def answers(self) -> str:
        return self.decision.target.worker.member.name


@dataclass(slots=True)
class AttemptHistory:
    """State that the attempts of one request share.

    ``tried``: pods that are not asked for an answer again. ``failed``: prefill engines that failed their half of a
    pair. ``alone``: why the answering engine computes the prompt: ``transfer``, it could not fetch the blocks, or
    ``expired``, their lease ended; empty: it does not have to. ``moved``: a pair failed without a visible death, which
    is retried once. ``answers``: the engine whose answer was returned last.
    """

    tried: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    deaths: int = 0
    alone: str = ""
    moved: bool = False
    answers: Worker | None = None
    attempts: list[dict[str, Any]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    transfers: list[dict[str, Any]] = field(default_factory=list)


class _LateError(Exception):
    """A request was not sent, because the prefilled blocks may be gone when it arrives."""


class Forwarder:
    """Places and sends requests until an engine answers."""

    def __init__(
        self,
        placer: Placer,
        engines: EngineClient,
        metrics: Metrics,
        stages: Stages,
        *,
        delivery: Delivery | None = None,
        prefill_seconds: float = PREFILL_SECONDS,
        waiting: WaitingLine | None = None,
        on_send: Callable[[Decision, Prepared], None] = lambda decision, prepared: None,
    ) -> None:
        """``on_send``: called right before each request. ``prefill_seconds``: timeout for a first result of a pair.

        ``waiting``: where new requests wait while all engines are full; without it they are refused.
        """
        self._placer, self._engines, self._metrics, self._on_send = placer, engines, metrics, on_send
        self._stages, self._prefill_seconds, self._waiting = stages, prefill_seconds, waiting
        self._delivery = delivery or BytesDelivery()
        self.quarantine: deque[bytes] = deque(maxlen=REMEMBERED)

    async def send(self, call: ForwardCall, past: AttemptHistory | None = None) -> EngineReply:
        """Return the first answer that is not a retryable refusal.

        ``past``: the earlier attempts of a request whose stream broke. Raises :class:`RequestError`: 503 with
        ``Retry-After`` without a worker for the request, and 400 when :data:`DEATHS` engines ended under it.
        """
        past = past if past is not None else AttemptHistory()
        if call.gateway is not None and not await self._quarantined(call):
            return await self._by_gateway(call, call.gateway, past)
        while past.deaths < DEATHS and not await self._quarantined(call):
            placed = await self._place_in_turn(call, past)
            past.tried.add(placed.answering)
            if placed.computes is not None:
                result = await self._by_pair(call, past, placed, placed.computes)
            else:
                result = await self._by_one(call, past, placed)
            if isinstance(result, EngineReply):
                past.answers = placed.decision.target.worker
                self._count_degraded(placed.form)
                return result
            self._metrics.retries.labels(result).inc()
        if not await self._quarantined(call):
            self.quarantine.append(await call.fingerprint())
        self._metrics.quarantined.inc()
        raise RequestError.quarantined()

    async def _quarantined(self, call: ForwardCall) -> bool:
        return bool(self.quarantine) and await call.fingerprint() in self.quarantine

    def without_route(self, path: str) -> set[str]:
        """Return the pods that do not serve a passed route. Raises :class:`RequestError` (404) if no engine does."""
        try:
            return self._placer.without_route(path)
        except RouteNotServedError as error:
            raise RequestError.not_served(path) from error

    def _outside(self, gateway: Gateway) -> set[str]:
        """Return the pods that a gateway does not allow. Raises :class:`RequestError` (503) where it allows none."""
        try:
            return self._placer.outside(gateway.allows)
        except NoWorkerError as error:
            raise RequestError.no_worker(str(error)) from error

    async def _place_in_turn(self, call: ForwardCall, past: AttemptHistory) -> PlacedAttempt:
        """Place a request. A new one waits behind those in line; a retry does not wait and may be refused."""
        try:
            if self._waiting is None or past.tried:
                return self._place(call, past)
            prepared, path = call.prepared, call.outgoing.path
            outside = frozenset(self._outside(call.gateway)) if call.gateway is not None else None
            engines = prepared.adapter, prepared.holder, prepared.pools, path if path in PASSED_ROUTES else "", outside
            return await self._waiting.place(call.tenant, lambda: self._place(call, past), engines)
        except QueueFullError as error:
            raise RequestError.queue_full(str(error)) from error

    def _place(self, call: ForwardCall, past: AttemptHistory) -> PlacedAttempt:
        form, path = self._stages.form(past.tried), call.outgoing.path
        prepared, policy, excluded = call.prepared, call.policy, past.tried
        if call.gateway is not None:
            excluded = excluded | self._outside(call.gateway)
        if path in PASSED_ROUTES:
            policy, excluded = "leastLoaded", excluded | self.without_route(path)
            if path != GENERATE:  # generating takes a pair of engines where there are pairs
                form = PipelineForm(ANSWERING)
        with child_span("schedule") as span:
            computes: Decision | None = None
            try:
                if form.paired:
                    decision, computes = choose_pair(
                        self._placer, prepared, form.answers, tried=excluded, failed=past.failed, policy=policy
                    )
                else:
                    decision = self._placer.place(prepared, exclude=excluded, policy=policy, roles=form.answers)
            except QueueFullError:
                raise
            except NoWorkerError as error:
                self._count_degraded(form)
                raise RequestError.no_worker(str(error)) from error
            if span:
                span.set_attributes(decision.span_attributes())
        return PlacedAttempt(form, decision, computes)

    async def _by_gateway(self, call: ForwardCall, gateway: Gateway, past: AttemptHistory) -> EngineReply:
        """Let a gateway send a request to the engine that is chosen here. Raises :class:`RequestError`."""
        placed = await self._place_in_turn(call, past)
        past.tried.add(placed.answering)
        decision, outgoing = placed.decision, call.outgoing
        booking = self._placer.begin(decision)
        trace = self._trace(call, past, placed, decision, staged=False)
        span = _span(decision, past)
        try:
            body = await outgoing.written(call.named(outgoing.fields, placed.answering))
            sent = decision, trace, booking, outgoing.path, body, span.propagate(call.headers), span
            reply = await self._engines.reply_through(gateway, *sent)
        except BaseException as error:
            _fail(error, past, trace, decision, booking, span)
            raise
        elsewhere = gateway.served_elsewhere(decision.target.worker.member.ip, HTTP_PORT)
        trace.add_attempt(decision, f"answered {reply.status}" + (f" by {elsewhere}" if elsewhere else ""))
        past.answers = decision.target.worker
        return reply

    async def _by_one(self, call: ForwardCall, past: AttemptHistory, placed: PlacedAttempt) -> EngineReply | str:
        decision, outgoing = placed.decision, call.outgoing
        booking = self._placer.begin(decision)
        result: StageResult | None = None
        # The engine that continues an answer encodes and computes everything itself.
        if placed.form.staged and outgoing.path == CHAT and call.answer is None:
            try:
                result = await self._stages.before(call, placed.form, decision, alone=past.alone)
            except BaseException:  # cancelled by a client that disconnects, too
                booking.end()
                raise
        try:
            return await self._by_answering(call, past, placed, booking, result)
        finally:
            if result is not None:
                self._stages.ended(result)

    async def _by_answering(
        self,
        call: ForwardCall,
        past: AttemptHistory,
        placed: PlacedAttempt,
        booking: Booking,
        result: StageResult | None,
    ) -> EngineReply | str:
        """Send a request to the engine that answers it, after the stages of ``result``."""
        decision, outgoing = placed.decision, call.outgoing
        if result is not None:
            past.stages += [report.as_json() for report in result.reports]
            past.transfers += result.transfers
            past.deaths += result.lost
            if past.deaths >= DEATHS:
                booking.end()
                return "engine_lost"
            if result.prefilled is not None:
                booking.answered()
        computed = (result.prefilled if result is not None else None) or decision
        trace = self._trace(call, past, placed, computed, staged=result is not None)
        span = _span(decision, past)
        fields = call.named(result.fields if result is not None else outgoing.fields, placed.answering)
        if outgoing.path == GENERATE:  # SGLang ignores the rank in the headers of this route
            fields = {**fields, **rank_field(decision.target.rank, decision.target.worker.ranks)}

        async def post(body: Body) -> EngineReply:
            if result is not None and result.read_by is not None and time.monotonic() >= result.read_by:
                raise _LateError
            headers = span.propagate(call.headers)
            return await self._engines.reply(decision, trace, booking, outgoing.path, body, headers, span)

        try:
            if call.answer is not None:
                sent = decision, trace, booking, outgoing, call.answer, call.headers, span
                reply = await self._engines.continue_answer(*sent)
            else:
                addressed = AddressedRequest(decision.target.worker, outgoing, fields)
                reply = await self._delivery.send(addressed, post, past.transfers)
            retry = await reply.refusal()
        except _LateError:
            # The prefill engine may drop the blocks before this one asks for them: the same engine computes the prompt.
            booking.end()
            span.fail("expired")
            span.end()
            past.alone = "expired"
            past.tried.discard(placed.answering)
            trace.add_attempt(decision, past.alone)
            return past.alone
        except BaseException as error:
            return _fail(error, past, trace, decision, booking, span)
        if retry is None and result is not None and result.prefilled is not None and reply.status >= 500:
            # The prefilled blocks may be gone: the same engine computes the prompt, or another one does.
            retry = past.alone = "transfer"
            past.tried.discard(placed.answering)
        if retry is not None:
            return _give_up(retry, reply, decision)
        trace.add_attempt(decision, f"answered {reply.status}")
        if result is not None and reply.status < 400:
            trace.stages.append(self._stages.answered(result, placed.answers).as_json())
        return reply if computed is decision else replace(reply, decision=computed)

    async def _by_pair(
        self, call: ForwardCall, past: AttemptHistory, placed: PlacedAttempt, computes: Decision
    ) -> EngineReply | str:
        decision, outgoing = placed.decision, call.outgoing
        booking = self._placer.begin(decision)
        booking.answered()
        trace = self._trace(call, past, placed, computes, staged=True)
        span = _span(decision, past)

        async def post(target: Target, headers: Mapping[str, str], fields: MeetingFields) -> Answer:
            body, own = await half_of(outgoing, fields)
            return await self._engines.post(target, call.request_id, outgoing.path, body, {**headers, **own})

        half = PrefillHalf(computes, self._placer.begin(computes), post, call.headers, self._prefill_seconds)
        sent = time.monotonic()
        try:
            body, own = await half_of(outgoing, half.decode_fields(decision.target))
            headers = {**span.propagate(call.headers), **own}
            reply = await half.beside(
                self._engines.reply(decision, trace, booking, outgoing.path, body, headers, span, half),
                EngineReply.drop,
            )
            retry = await reply.refusal()
        except PrefillError as error:
            self._report(trace, half.report(error.cause))
            trace.add_attempt(computes, f"{error.cause}: {error}")
            span.fail(error.cause)
            if (refusal := error.refusal) is not None:
                return EngineReply(computes, trace, booking, refusal, refusal.body, span)
            booking.end()
            span.end()
            past.deaths += error.died
            past.failed.add(computes.target.worker.member.uid)
            if error.cause != "timeout" or not past.moved:
                past.tried.discard(placed.answering)
            past.moved |= error.cause == "timeout"  # either engine may hang: a second timeout excludes both
            return error.cause
        except BaseException as error:
            half.end()
            return _fail(error, past, trace, decision, booking, span)
        if (failure := failure_of_sglang(reply.status, reply.first)) is not None:
            half.end()
            if retry is None and failure.status >= 500 and not past.moved:
                # The prefill engine may have caused it, and its end becomes visible a moment later.
                retry, past.moved = "transfer", True
                past.tried.discard(placed.answering)
        if retry is not None:
            return _give_up(retry, reply, decision)
        trace.add_attempt(decision, f"answered {reply.status}")
        if reply.status < 400:
            self._report(trace, half.report("done"))
            answer = StageReport("answer", "first_byte", (placed.answers,), time.monotonic() - sent)
            trace.stages.append(answer.as_json())
        return replace(reply, decision=computes)

    def _trace(
        self, call: ForwardCall, past: AttemptHistory, placed: PlacedAttempt, computed: Decision, *, staged: bool
    ) -> DecisionTrace:
        """Return the trace of an attempt that is about to be sent. ``staged``: it involves several engines."""
        trace = trace_of(call.request_id, call.prepared, computed)
        trace.attempts, trace.stages, trace.transfers = past.attempts, past.stages, past.transfers
        trace.form, trace.degraded = placed.form.name, placed.form.degraded
        if staged:
            trace.answers = placed.answers
        self._on_send(computed, call.prepared)
        return trace

    def _count_degraded(self, form: PipelineForm) -> None:
        """Count the pools that a request is served without; called once per request."""
        for missing in form.degraded:
            self._metrics.degraded.labels(missing).inc()

    def _report(self, trace: DecisionTrace, report: StageReport) -> None:
        trace.stages.append(report.as_json())
        self._stages.count(report)


def _span(decision: Decision, past: AttemptHistory) -> Span:
    span, worker = child_span("engine", client=True), decision.target.worker.member.name
    if span:
        span.set_attributes({"mmrouter.worker": worker, "mmrouter.attempt": len(past.tried)})
    return span


def _fail(
    error: BaseException, past: AttemptHistory, trace: DecisionTrace, decision: Decision, booking: Booking, span: Span
) -> str:
    """End an attempt without an answer and return why to retry. Raises errors that are not the engine's."""
    booking.end()
    try:
        if not isinstance(error, UpstreamError):
            span.fail(failure_of(error))
            raise error
        if error.exhausted:
            span.fail("exhausted")
            raise RequestError.exhausted() from error
        cause = "engine_lost" if error.sent else "connect"
        span.fail(cause)
    finally:
        span.end()
    trace.add_attempt(decision, f"{cause}: {error}")
    past.deaths += error.sent
    return cause


def _give_up(why: str, reply: EngineReply, decision: Decision) -> str:
    """End an attempt whose engine refused in a way that the client does not get."""
    reply.span.fail(why)
    reply.close()
    reply.trace.add_attempt(decision, why)
    return why
