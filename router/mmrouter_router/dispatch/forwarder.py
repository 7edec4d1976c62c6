"""Send a placed request to its engine; only before the first answer byte try another (docs/architecture.md)."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmrouter_lib.engines.sglang.disaggregation import failure_of as failure_of_sglang
from mmrouter_router.core.errors import RequestError
from mmrouter_router.dispatch.exchange import Exchange, Reply
from mmrouter_router.dispatch.quarantine import DEATHS, Quarantine
from mmrouter_router.dispatch.sglang_pair import Prefill, PrefillError, choose
from mmrouter_router.dispatch.stages import PREFILL_SECONDS, Note, Staged, Stages
from mmrouter_router.explain.decisions import Trace, trace_of
from mmrouter_router.fleet.workers import Target
from mmrouter_router.handover import ByBytes, Delivery, Parcel
from mmrouter_router.http.upstream import Answer, Body, UpstreamError
from mmrouter_router.request.engine_request import CHAT, Outgoing
from mmrouter_router.request.prepare import Prepared
from mmrouter_router.scheduling.pipeline_form import WHOLE, Form
from mmrouter_router.scheduling.placer import Booking, Decision, FullError, NoWorkerError, Placer
from mmrouter_router.scheduling.scoring import Policy
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.tracing import Span, failure_of, stage


@dataclass(slots=True)
class Call:
    """One request that is to be answered, whoever does it."""

    request_id: str
    prepared: Prepared
    outgoing: Outgoing
    headers: Mapping[str, str]
    policy: Policy | None = None


@dataclass(slots=True)
class Placed:
    """Who serves one attempt. ``computes``: the engine that prefills beside the one that answers, of a pair."""

    form: Form
    decision: Decision
    computes: Decision | None = None


@dataclass(slots=True)
class Past:
    """What the attempts of one request came to so far."""

    tried: set[str] = field(default_factory=set)
    """Pods that are not asked for an answer again."""
    failed: set[str] = field(default_factory=set)
    """Prefill engines that failed their half of a pair."""
    deaths: int = 0
    alone: bool = False
    """The answering engine computes the prompt itself, because it could not fetch it."""
    moved: bool = False
    """A pair failed, and neither engine was seen to be gone: done once."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    chain: list[dict[str, Any]] = field(default_factory=list)
    travelled: list[dict[str, Any]] = field(default_factory=list)

    def again(self, decision: Decision) -> None:
        """Let an engine be asked once more: what failed was not it."""
        self.tried.discard(decision.target.worker.member.uid)


class Forwarder:
    """Places and sends requests until one engine answers."""

    def __init__(
        self,
        placer: Placer,
        exchange: Exchange,
        metrics: Metrics,
        *,
        stages: Stages | None = None,
        delivery: Delivery | None = None,
        prefill_seconds: float = PREFILL_SECONDS,
        sent: Callable[[Decision, Prepared], None] = lambda decision, prepared: None,
    ) -> None:
        """``sent`` is called with every request right before it goes to an engine.

        ``stages``: what is done before an engine answers; ``None``: nothing. ``prefill_seconds``: after so long a pair
        of which nothing came is given up.
        """
        self._placer, self._exchange, self._metrics, self._sent = placer, exchange, metrics, sent
        self._stages, self._prefill_seconds = stages, prefill_seconds
        self._delivery = delivery or ByBytes()
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
        call, past = Call(request_id, prepared, outgoing, headers, policy), Past()
        while past.deaths < DEATHS and fingerprint not in self.quarantine:
            placed = self._place(call, past)
            past.tried.add(placed.decision.target.worker.member.uid)
            if placed.computes is not None:
                done = await self._by_pair(call, past, placed, placed.computes)
            else:
                done = await self._by_one(call, past, placed)
            if isinstance(done, Reply):
                self._gone_without(placed.form)
                return done
            self._metrics.retries.labels(done).inc()
        self.quarantine.add(fingerprint)
        self._metrics.quarantined.inc()
        raise RequestError.quarantined()

    # -- one attempt: a reply, or why there has to be another one ----------------------------------------------------

    def _place(self, call: Call, past: Past) -> Placed:
        shape = self._stages.form(past.tried) if self._stages is not None else WHOLE
        with stage("schedule") as told:
            computes: Decision | None = None
            try:
                if shape.paired:
                    decision, computes = choose(
                        self._placer,
                        call.prepared,
                        shape.answers,
                        tried=past.tried,
                        failed=past.failed,
                        policy=call.policy,
                    )
                else:
                    decision = self._placer.place(
                        call.prepared, exclude=past.tried, policy=call.policy, roles=shape.answers
                    )
            except NoWorkerError as error:
                self._gone_without(shape)
                if isinstance(error, FullError):
                    raise RequestError.queue_full(str(error)) from error
                raise RequestError.no_worker(str(error)) from error
            if told:
                told.tell(decision.span_attributes())
        return Placed(shape, decision, computes)

    async def _by_one(self, call: Call, past: Past, placed: Placed) -> Reply | str:
        """Ask one engine for the answer, after what others do before it."""
        decision, outgoing = placed.decision, call.outgoing
        booking = self._placer.begin(decision)
        staged: Staged | None = None
        if self._stages is not None and placed.form.staged and outgoing.path == CHAT:
            try:
                staged = await self._stages.before(
                    call.request_id, call.prepared, outgoing, placed.form, decision, call.headers, alone=past.alone
                )
            except BaseException:  # a client that leaves, too: nobody else would end the booking
                booking.end()
                raise
            past.chain += [note.as_json() for note in staged.notes]
            past.travelled += staged.travelled
            past.deaths += staged.lost
            if past.deaths >= DEATHS:
                booking.end()
                return "engine_lost"
            if staged.prefilled is not None:
                booking.answered()
        computed = (staged.prefilled if staged is not None else None) or decision
        trace = self._traced(call, past, placed, computed, chained=staged is not None)
        span = _span(decision, past)
        fields = staged.fields if staged is not None else outgoing.fields

        async def post(body: Body) -> Reply:
            return await self._exchange.reply(decision, trace, booking, outgoing.path, body, call.headers, span)

        try:
            reply = await self._delivery.send(Parcel(decision.target.worker, outgoing, fields), post, past.travelled)
            retry = await reply.refusal()
        except BaseException as error:
            return _lost(error, past, trace, decision, booking, span)
        if retry is None and staged is not None and staged.prefilled is not None and reply.answer.status >= 500:
            # What the prefill held may be gone: the same engine computes the prompt, or another does.
            retry, past.alone = "transfer", True
            past.again(decision)
        if retry is not None:
            return _given_up(retry, reply, decision)
        trace.tried(decision, f"answered {reply.answer.status}")
        if self._stages is not None and staged is not None and reply.answer.status < 400:
            trace.chain.append(self._stages.answered(staged, decision.target.worker.member.name).as_json())
        return reply if computed is decision else replace(reply, decision=computed)

    async def _by_pair(self, call: Call, past: Past, placed: Placed, computes: Decision) -> Reply | str:
        """Ask two engines for the answer at once: one computes the prompt, the other one answers."""
        decision, outgoing = placed.decision, call.outgoing
        booking = self._placer.begin(decision)
        booking.answered()
        trace = self._traced(call, past, placed, computes, chained=True)
        span = _span(decision, past)
        half = self._half(computes, call)
        sent = time.monotonic()
        try:
            reply = await half.beside(
                self._exchange.reply(decision, trace, booking, outgoing.path, outgoing.plain, call.headers, span, half),
                Reply.drop,
            )
            retry = await reply.refusal()
        except PrefillError as error:
            self._noted(trace, half.note(error.cause))
            trace.tried(computes, f"{error.cause}: {error}")
            span.fail(error.cause)
            if (refusal := error.refusal) is not None:
                return Reply(computes, trace, booking, refusal, refusal.body, span)
            booking.end()
            span.end()
            past.deaths += error.died
            past.failed.add(computes.target.worker.member.uid)
            if error.cause != "timeout" or not past.moved:
                past.again(decision)  # it did nothing wrong, and waits for nobody now
            past.moved |= error.cause == "timeout"  # which of the two hangs is not seen: next time it counts as both
            return error.cause
        except BaseException as error:
            half.end()
            return _lost(error, past, trace, decision, booking, span)
        if (failure := failure_of_sglang(reply.answer.status, reply.first)) is not None:
            half.end()
            if retry is None and failure.status >= 500 and not past.moved:
                # Its partner may have failed it, and be seen to be gone a moment later.
                retry, past.moved = "transfer", True
                past.again(decision)
        if retry is not None:
            return _given_up(retry, reply, decision)
        trace.tried(decision, f"answered {reply.answer.status}")
        if reply.answer.status < 400:
            self._noted(trace, half.note("done"))
            answers = (decision.target.worker.member.name,)
            trace.chain.append(Note("answer", "first_byte", answers, time.monotonic() - sent).as_json())
        return replace(reply, decision=computes)

    # -- their parts -------------------------------------------------------------------------------------------------

    def _traced(self, call: Call, past: Past, placed: Placed, computed: Decision, *, chained: bool) -> Trace:
        """Return what is kept of an attempt that is about to be sent. ``chained``: more than one engine is in it."""
        trace = trace_of(call.request_id, call.prepared, computed)
        trace.attempts, trace.chain, trace.travelled = past.attempts, past.chain, past.travelled
        trace.form, trace.degraded = placed.form.name, placed.form.degraded
        if chained:
            trace.answers = placed.decision.target.worker.member.name
        self._sent(computed, call.prepared)
        return trace

    def _half(self, computes: Decision, call: Call) -> Prefill:
        """Send a request to the engine that computes its prompt, while another one answers it."""

        async def send(target: Target, told: Mapping[str, str]) -> Answer:
            return await self._exchange.post(target, call.request_id, call.outgoing.path, call.outgoing.plain, told)

        return Prefill(computes, self._placer.begin(computes), send, call.headers, self._prefill_seconds)

    def _gone_without(self, shape: Form) -> None:
        """Count a request once, when it is clear which pools it had to do without."""
        for missing in shape.degraded:
            self._metrics.degraded.labels(missing).inc()

    def _noted(self, trace: Trace, note: Note) -> None:
        trace.chain.append(note.as_json())
        if self._stages is not None:
            self._stages.count(note)


def _span(decision: Decision, past: Past) -> Span:
    span = stage("engine", client=True)
    if span:
        span.tell({"mmrouter.worker": decision.target.worker.member.name, "mmrouter.attempt": len(past.tried)})
    return span


def _lost(error: BaseException, past: Past, trace: Trace, decision: Decision, booking: Booking, span: Span) -> str:
    """End an attempt whose engine gave no answer; return why there is another one. Raises what is not its fault."""
    booking.end()
    try:
        if not isinstance(error, UpstreamError):
            span.fail(failure_of(error))
            raise error
        cause = "engine_lost" if error.sent else "connect"
        span.fail(cause)
    finally:
        span.end()
    trace.tried(decision, f"{cause}: {error}")
    past.deaths += error.sent
    return cause


def _given_up(why: str, reply: Reply, decision: Decision) -> str:
    """End an attempt whose engine sent a refusal that is not for the client."""
    reply.span.fail(why)
    reply.close()
    reply.trace.tried(decision, why)
    return why
