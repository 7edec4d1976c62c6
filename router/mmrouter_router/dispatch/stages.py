"""Stages before an engine answers: images to encoders, the prompt to a prefill engine (docs/disaggregation.md).

No failed stage fails a request: the next engine has the bytes and does the work itself. The request's trace and a
metric record each stage and why it was skipped.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.vllm import stage_requests
from mmrouter_router.encoding.encoder_queue import Image, Mode
from mmrouter_router.encoding.image_sender import EncodeError, ImageSender, ImageToEncode
from mmrouter_router.fleet.workers import Fleet, Target
from mmrouter_router.handover.request_delivery import AddressedRequest, BufferedAnswer, BytesDelivery, Delivery
from mmrouter_router.http.engine_connection import Body, UpstreamError
from mmrouter_router.http.gateway import Gateway
from mmrouter_router.request.prepared import CHAT, Outgoing, Prepared
from mmrouter_router.scheduling.candidates import NoWorkerError
from mmrouter_router.scheduling.disaggregation import OffloadPolicy, PipelineForm, choose_form
from mmrouter_router.scheduling.offload_comparison import Waiting
from mmrouter_router.scheduling.placer import Decision, Placer
from mmrouter_router.scheduling.scoring import Policy
from mmrouter_router.streams.answer import StreamedAnswer
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.tracing import child_span, failure_of

PREFILL_SECONDS = 120.0  # timeout of a prefill, after which the decoder computes the prompt
ENCODE_SECONDS = 120.0

AskEngine = Callable[[Target, str, str, Body, Mapping[str, str]], Awaitable[tuple[int, bytes]]]
"""Target, request id, path, body, headers -> status and whole answer. Raises :class:`UpstreamError`."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage of a request. ``outcome``: ``done``, or why it was skipped or failed."""

    stage: Literal["encode", "prefill", "answer"]
    outcome: str
    workers: tuple[str, ...] = ()
    seconds: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        shown = {"stage": self.stage, "outcome": self.outcome, "workers": list(self.workers)}
        return {**shown, "seconds": round(self.seconds, 6), **self.detail}


@dataclass(slots=True)
class StageResult:
    """Result of the stages. ``fields``: the request's, with other engines' parameters.

    ``prefilled``: the prefill engine, where it computed the prompt. ``waiting``: until :meth:`Stages.ended`, where the
    cost decided whether it does. Times are seconds of a monotonic clock.
    """

    fields: Mapping[str, Any]
    reports: list[StageReport]
    prefilled: Decision | None = None
    read_by: float | None = None  # when the answering engine must have the request to find the prefilled blocks
    waiting: Waiting | None = None
    sent: float = 0.0  # after the last stage
    remaining: int = 0  # prompt tokens that the answering engine did not hold
    lost: bool = False  # an engine ended under a stage
    transfers: list[dict[str, Any]] = field(default_factory=list)  # of images to the engines of the stages


@dataclass(slots=True)
class ForwardCall:
    """A request on its way to engines. ``answer``: the part that the client has; the engine continues its token ids.

    ``fingerprint``: computes the hash by which the quarantine recognises the request; only few requests need it.
    ``gateway``: sends it instead of the router. ``stored_as``: returns the id under which the engine of a pod (its uid)
    stores the answer, ``None`` where it stores none.
    """

    request_id: str
    prepared: Prepared
    outgoing: Outgoing
    headers: Mapping[str, str]
    fingerprint: Callable[[], Awaitable[bytes]]
    policy: Policy | None = None
    tenant: str = ""
    answer: StreamedAnswer | None = None
    encoder_mode: Mode | None = None
    gateway: Gateway | None = None
    stored_as: Callable[[str], str] | None = None

    def named(self, fields: Mapping[str, Any], pod: str) -> Mapping[str, Any]:
        """Return the fields of the request for the engine of a pod, which names a stored answer by ``request_id``."""
        return fields if self.stored_as is None else {**fields, "request_id": self.stored_as(pod)}


class Stages:
    """Runs the stages that a deployment's pools make possible. ``encoding`` is ``None`` without encoder pools."""

    def __init__(
        self,
        engine: EngineType,
        pools: Iterable[str],
        fleet: Fleet,
        placer: Placer,
        metrics: Metrics,
        ask: AskEngine,
        encoding: ImageSender | None = None,
        offload: OffloadPolicy | None = None,
        delivery: Delivery | None = None,
        leases: stage_requests.BlockLeases | None = None,
    ) -> None:
        """``pools``: the roles of the deployment's pools."""
        self._adapter, self._pools = adapter(engine), frozenset(pools)
        self._fleet, self._placer, self._metrics, self._ask = fleet, placer, metrics, ask
        self._encoding, self._delivery = encoding, delivery or BytesDelivery()
        self.offload = offload or OffloadPolicy()
        self._leases = leases or stage_requests.BlockLeases(None)
        self._plain = self._pools <= {"worker", "renderer"}  # the form is the same for all pods
        alone = {"worker"} if self._adapter.pairs_prefill_and_decode else {"worker", "prefill", "decode"}
        self._answering = (self._pools & alone) or frozenset({"worker"})
        self._whole = PipelineForm(self._answering)

    def encoders(self) -> list[dict[str, Any]]:
        """Return the work of each encoder for this router; empty where it has none."""
        return self._encoding.state() if self._encoding is not None else []

    def form(self, tried: Collection[str] = ()) -> PipelineForm:
        """Return the stages that the pods can serve now. Roles that answer are in it even without an able pod.

        ``tried``: uids of pods that failed this request. Outside of pairs they count as down before their sidecars
        report it, so that the death of the only decode engine leaves the request to the prefill engines.
        """
        if self._plain:
            return self._whole
        layouts: dict[str, set[str]] = {}
        for worker in self._fleet:
            if worker.member.uid in tried and not self._adapter.pairs_prefill_and_decode:
                continue
            serves_images = self._adapter.asks_encoders_itself and worker.serving
            if serves_images if worker.member.role == "encoder" else self._placer.able(worker):
                layouts.setdefault(worker.member.role, set()).add(worker.member.compatibility)
        able = set(layouts)
        prefill_layouts, decode_layouts = layouts.get("prefill", set()), layouts.get("decode", set())
        if self._adapter.pairs_prefill_and_decode and prefill_layouts.isdisjoint(decode_layouts):
            able -= {"prefill", "decode"}  # a pair exchanges blocks of one layout
        if self._encoding is not None and self._encoding.able:
            able.add("encoder")
        form = choose_form(self._adapter.type, self._pools, able)
        return form if form.answers else replace(form, answers=self._answering)

    async def before(
        self, call: ForwardCall, form: PipelineForm, decision: Decision, *, alone: str = ""
    ) -> StageResult:
        """Run the stages before the engine of ``decision`` answers. Fails only by cancellation.

        ``alone``: why that engine computes the prompt itself; empty unless it could not fetch it.
        """
        prepared, fields, computes = call.prepared, call.outgoing.fields, decision
        result = StageResult(fields, [], remaining=_remaining(prepared, decision))
        if form.prefills and decision.target.worker.member.role == "decode":
            why = alone or stage_requests.why_whole(fields) or self.offload.reason_local(result.remaining)
            if not why:
                try:
                    computes = self._placer.place(
                        prepared, roles=("prefill",), policy=decision.policy, partner=decision.target.worker
                    )
                except NoWorkerError:
                    why = "no_partner"
            if why:
                self._report(result, StageReport("prefill", why, detail={"remaining_tokens": result.remaining}))
            if why in ("", "slower"):
                result.waiting = self.offload.comparison.begin(decision.target.worker.id, elsewhere=not why)
        try:
            if form.encodes and computes.target.worker.member.role != "decode":
                result.fields = await self._encode(call, result, computes)
            if computes is not decision:
                result.fields = await self._prefill(call, result, computes)
        except BaseException:  # a cancellation too, or a request whose client left would count as waiting for ever
            self.ended(result)
            raise
        result.sent = time.monotonic()
        return result

    def answered(self, result: StageResult, worker: str) -> StageReport:
        """Measure the first byte of the answer; returns the last stage's report."""
        self.ended(result, result.remaining)
        return StageReport("answer", "first_byte", (worker,), time.monotonic() - result.sent)

    def ended(self, result: StageResult, tokens: int = 0) -> None:
        """End a request's wait for its first byte, once. ``tokens``: 0 where it failed."""
        if result.waiting is not None:
            self.offload.comparison.end(result.waiting, tokens)
            result.waiting = None

    async def _encode(self, call: ForwardCall, result: StageResult, computes: Decision) -> Mapping[str, Any]:
        """Encode the images that the computing engine's blocks do not hold; returns the fields to continue with."""
        assert self._encoding is not None
        outgoing = call.outgoing
        images = _uncovered(call.prepared, outgoing, computes)
        if not images:
            if outgoing.images:
                self._report(result, StageReport("encode", "held"))
            return outgoing.fields
        began = time.monotonic()
        with child_span("encode") as span:
            try:
                async with asyncio.timeout(ENCODE_SECONDS):
                    headers = span.propagate(call.headers)
                    encoded = await self._encoding.encode(call.request_id, images, headers, call.encoder_mode)
            except (EncodeError, TimeoutError) as error:
                reason = error.reason if isinstance(error, EncodeError) else "timeout"
                span.fail(failure_of(error))
                self._report(result, StageReport("encode", reason, seconds=time.monotonic() - began))
                return outgoing.fields
        placed = [
            {"identity": image.sent.uuid, "how": at.how, "encoder": at.encoder, "weighed": dict(at.weighed)}
            for image, at in zip(images, encoded.placed, strict=True)
        ]
        tokens = sum(image.image.tokens for image in images)
        result.transfers += encoded.transfers
        workers = tuple(sorted({at.encoder for at in encoded.placed}))
        detail = {"images": len(images), "tokens": tokens, "placed": placed}
        self._report(result, StageReport("encode", "done", workers, encoded.seconds, detail))
        return stage_requests.with_embeddings(
            outgoing.fields, encoded.params, [image.uuid for image in outgoing.images]
        )

    async def _prefill(self, call: ForwardCall, result: StageResult, computes: Decision) -> Mapping[str, Any]:
        """Compute a prompt at another engine than the answering one; returns the fields for the answering one."""
        target, winner, outgoing = computes.target, computes.choice.winner, call.outgoing
        began = time.monotonic()
        outcome, params = "done", None
        booking = self._placer.begin(computes)
        addressed = AddressedRequest(target.worker, outgoing, stage_requests.prefill_request(result.fields))
        with child_span("prefill", client=True) as span:

            async def post(body: Body) -> BufferedAnswer:
                headers = span.propagate(call.headers)
                return BufferedAnswer(*await self._ask(target, call.request_id, CHAT, body, headers))

            span.set_attributes({"mmrouter.worker": target.worker.member.name})
            try:
                async with asyncio.timeout(PREFILL_SECONDS):
                    answer = await self._delivery.send(addressed, post, result.transfers)
                if answer.status == 200:
                    params = stage_requests.read_prefilled(answer.raw)
                else:
                    outcome = f"answered_{answer.status}"
            except stage_requests.StageError:
                outcome = "unusable"
            except TimeoutError:
                outcome = "timeout"
            except UpstreamError as error:
                outcome, result.lost = ("engine_lost" if error.sent else "connect"), error.sent
            finally:
                booking.end()
            if outcome != "done":
                span.fail(outcome)
        detail = {"overlap": winner.overlap, "blocks": winner.blocks, "why": computes.choice.reason}
        detail["remaining_tokens"] = result.remaining
        self._report(result, StageReport("prefill", outcome, (winner.name,), time.monotonic() - began, detail))
        if params is None:
            # The request has the bytes: the decoder computes what the prefill did not.
            return outgoing.fields
        result.prefilled = computes
        result.read_by = self._leases.deadline(target.worker.id, params, time.monotonic())
        return stage_requests.decode_request(outgoing.fields, params)

    def _report(self, result: StageResult, report: StageReport) -> None:
        result.reports.append(report)
        self.count(report)

    def count(self, report: StageReport) -> None:
        outcome = "answered" if report.outcome.startswith("answered_") else report.outcome
        self._metrics.chain.labels(report.stage, outcome).inc()
        if report.outcome == "done":
            self._metrics.chain_seconds.labels(report.stage).observe(report.seconds)


def _remaining(prepared: Prepared, decision: Decision) -> int:
    """Return the tokens of the prompt that the chosen engine does not hold."""
    winner = decision.choice.winner
    held = winner.overlap * decision.target.block_size if winner.scored else 0
    return max(0, len(prepared.ids) - held)


def _uncovered(prepared: Prepared, outgoing: Outgoing, computes: Decision) -> list[ImageToEncode]:
    """Return the images, each once, that do not end within the computing engine's held blocks."""
    held = len(prepared.ids) - _remaining(prepared, computes)
    uncovered: dict[str, ImageToEncode] = {}
    spans = prepared.spans or (None,) * len(prepared.images)  # the prompt was not predicted
    for image, span, sent in zip(prepared.images, spans, outgoing.images, strict=False):  # some engines drop images
        if span is None or span.end > held:
            uncovered.setdefault(sent.uuid, ImageToEncode(Image(image.identity, image.tokens), sent))
    return list(uncovered.values())
