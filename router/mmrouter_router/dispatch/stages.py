"""What is done before an engine answers: images to encoders, the prompt to a prefill engine (docs/disaggregation.md).

Every stage may fail, and none of them fails a request: the engine that comes next has the bytes and does the work
itself. What was gone without, and why, stands in the request's trace and in a metric.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.vllm.disaggregation import (
    StageError,
    decode_request,
    prefill_request,
    read_prefilled,
    why_whole,
    with_embeddings,
)
from mmrouter_router.encoding import Image
from mmrouter_router.encoding.sender import EncodeError, Encoding, Shown
from mmrouter_router.fleet.workers import Fleet, Target
from mmrouter_router.handover import ByBytes, Delivery, Parcel, Said
from mmrouter_router.http.upstream import Body, UpstreamError
from mmrouter_router.request.engine_request import CHAT, Outgoing
from mmrouter_router.request.prepare import Prepared
from mmrouter_router.scheduling.pipeline_form import Form, Worth, form
from mmrouter_router.scheduling.placer import Decision, NoWorkerError, Placer
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.tracing import failure_of, stage

PREFILL_SECONDS = 120.0
"""A prefill that takes longer is given up: its engine hangs, and the decoder computes the prompt."""
ENCODE_SECONDS = 120.0

Ask = Callable[[Target, str, str, Body, Mapping[str, str]], Awaitable[tuple[int, bytes]]]
"""Target, request id, path, body, headers -> status and whole answer. Raises :class:`UpstreamError`."""


@dataclass(frozen=True, slots=True)
class Note:
    """One stage of a request: which engines had it, how it went (``done``, or why without it), and its seconds."""

    stage: Literal["encode", "prefill", "answer"]
    outcome: str
    workers: tuple[str, ...] = ()
    seconds: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "stage": self.stage,
            "outcome": self.outcome,
            "workers": list(self.workers),
            "seconds": round(self.seconds, 6),
            **self.detail,
        }


@dataclass(slots=True)
class Staged:
    """What the answering engine is sent, and who computed the prompt where that was another one."""

    fields: Mapping[str, Any]
    """The request's, with what other engines said."""
    notes: list[Note]
    prefilled: Decision | None = None
    began: float = 0.0  # seconds of a monotonic clock, before the first stage
    sent: float = 0.0  # and after the last one
    remaining: int = 0  # prompt tokens that the answering engine did not hold
    lost: bool = False  # an engine ended under a stage
    travelled: list[dict[str, Any]] = field(default_factory=list)  # how images reached the engines before


class Stages:
    """Runs the stages that a deployment's pools make possible. ``encoding`` is ``None`` without encoder pools."""

    def __init__(
        self,
        engine: EngineType,
        pools: Iterable[str],
        fleet: Fleet,
        placer: Placer,
        metrics: Metrics,
        ask: Ask,
        encoding: Encoding | None = None,
        worth: Worth | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        """``pools``: the roles of the resource's pools."""
        self._adapter, self._pools = adapter(engine), frozenset(pools)
        self._fleet, self._placer, self._metrics, self._ask = fleet, placer, metrics, ask
        self._encoding, self._delivery = encoding, delivery or ByBytes()
        self.worth = worth or Worth()
        self._plain = self._pools <= {"worker", "renderer"}  # whatever pods there are
        alone = {"worker"} if self._adapter.pairs_prefill_and_decode else {"worker", "prefill", "decode"}
        self._answering = (self._pools & alone) or frozenset({"worker"})
        self._whole = Form(self._answering)

    def form(self, tried: Collection[str] = ()) -> Form:
        """Return the stages that the pods can serve now. Roles that answer are in it even when no pod of theirs can.

        ``tried``: uids of pods that failed the request at hand. Of vLLM they are down before their sidecars say so,
        so that the only decode engine's death leaves the request to those that prefill.
        """
        if self._plain:
            return self._whole
        layouts: dict[str, set[str]] = {}
        for worker in self._fleet:
            if worker.member.uid in tried and not self._adapter.pairs_prefill_and_decode:
                continue
            asked = self._adapter.asks_encoders_itself and worker.serving
            if asked if worker.member.role == "encoder" else self._placer.able(worker):
                layouts.setdefault(worker.member.role, set()).add(worker.member.compatibility)
        able = set(layouts)
        prefill_layouts, decode_layouts = layouts.get("prefill", set()), layouts.get("decode", set())
        if self._adapter.pairs_prefill_and_decode and prefill_layouts.isdisjoint(decode_layouts):
            able -= {"prefill", "decode"}  # neither does anything alone, and they exchange blocks of one layout only
        if self._encoding is not None and self._encoding.able:
            able.add("encoder")
        found = form(self._adapter.type, self._pools, able)
        return found if found.answers else replace(found, answers=self._answering)

    async def before(
        self,
        request_id: str,
        prepared: Prepared,
        outgoing: Outgoing,
        shape: Form,
        decision: Decision,
        headers: Mapping[str, str],
        *,
        alone: bool = False,
    ) -> Staged:
        """Do what comes before the answer; ``decision`` says who will give it. Fails only by cancellation.

        ``alone``: that engine computes the prompt itself, because it could not fetch it.
        """
        staged = Staged(outgoing.fields, [], began=time.monotonic(), remaining=_remaining(prepared, decision))
        computes = decision
        if shape.prefills and decision.target.worker.member.role == "decode":
            why = "transfer" if alone else why_whole(outgoing.fields) or self.worth.why_here(staged.remaining)
            if not why:
                try:
                    computes = self._placer.place(
                        prepared, roles=("prefill",), policy=decision.policy, partner=decision.target.worker
                    )
                except NoWorkerError:
                    why = "no_partner"
            if why:
                self._note(staged, Note("prefill", why, detail={"remaining_tokens": staged.remaining}))
        fields: Mapping[str, Any] = outgoing.fields
        if shape.encodes and computes.target.worker.member.role != "decode":
            fields = await self._encode(request_id, prepared, outgoing, computes, headers, staged)
        if computes is not decision:
            fields = await self._prefill(request_id, prepared, outgoing, fields, computes, headers, staged)
        staged.sent = time.monotonic()
        staged.fields = fields
        return staged

    def answered(self, staged: Staged, worker: str) -> Note:
        """The first byte of the answer is there: learn from how long all of it took. Returns the last stage's note."""
        now = time.monotonic()
        if any(note.stage == "prefill" for note in staged.notes):
            self.worth.observe(staged.remaining, now - staged.began, apart=staged.prefilled is not None)
        return Note("answer", "first_byte", (worker,), now - staged.sent)

    # -- the stages --------------------------------------------------------------------------------------------------

    async def _encode(
        self,
        request_id: str,
        prepared: Prepared,
        outgoing: Outgoing,
        computes: Decision,
        headers: Mapping[str, str],
        staged: Staged,
    ) -> Mapping[str, Any]:
        """Have the images encoded that the computing engine's blocks do not hold. Returns the fields to go on with."""
        assert self._encoding is not None
        shown = _uncovered(prepared, outgoing, computes)
        if not shown:
            if outgoing.images:
                self._note(staged, Note("encode", "held"))
            return outgoing.fields
        began = time.monotonic()
        with stage("encode") as span:
            try:
                async with asyncio.timeout(ENCODE_SECONDS):
                    done = await self._encoding.encode(request_id, shown, span.passed_on(headers))
            except (EncodeError, TimeoutError) as error:
                reason = error.reason if isinstance(error, EncodeError) else "timeout"
                span.fail(failure_of(error))
                self._note(staged, Note("encode", reason, seconds=time.monotonic() - began))
                return outgoing.fields
        detail = {
            "images": len(shown),
            "tokens": sum(one.image.tokens for one in shown),
            "placed": [
                {
                    "identity": one.sent.uuid,
                    "how": placed.how,
                    "encoder": placed.encoder,
                    "weighed": dict(placed.weighed),
                }
                for one, placed in zip(shown, done.placed, strict=True)
            ],
        }
        staged.travelled += done.travelled
        workers = tuple(sorted({placed.encoder for placed in done.placed}))
        self._note(staged, Note("encode", "done", workers, done.seconds, detail))
        return with_embeddings(outgoing.fields, done.params, [image.uuid for image in outgoing.images])

    async def _prefill(
        self,
        request_id: str,
        prepared: Prepared,
        outgoing: Outgoing,
        fields: Mapping[str, Any],
        computes: Decision,
        headers: Mapping[str, str],
        staged: Staged,
    ) -> Mapping[str, Any]:
        """Have a prompt computed by another engine than the answering one. Returns the fields for that one."""
        target, winner = computes.target, computes.choice.winner
        began = time.monotonic()
        outcome, params = "done", None
        booking = self._placer.begin(computes)
        parcel = Parcel(target.worker, outgoing, prefill_request(fields))
        with stage("prefill", client=True) as span:

            async def post(body: Body) -> Said:
                return Said(*await self._ask(target, request_id, CHAT, body, span.passed_on(headers)))

            span.tell({"mmrouter.worker": target.worker.member.name})
            try:
                async with asyncio.timeout(PREFILL_SECONDS):
                    said = await self._delivery.send(parcel, post, staged.travelled)
                if said.status == 200:
                    params = read_prefilled(said.raw)
                else:
                    outcome = f"answered_{said.status}"
            except StageError:
                outcome = "unusable"
            except TimeoutError:
                outcome = "timeout"
            except UpstreamError as error:
                outcome, staged.lost = ("engine_lost" if error.sent else "connect"), error.sent
            finally:
                booking.end()
            if outcome != "done":
                span.fail(outcome)
        detail = {
            "overlap": winner.overlap,
            "blocks": winner.blocks,
            "remaining_tokens": staged.remaining,
            "why": computes.choice.reason,
        }
        self._note(staged, Note("prefill", outcome, (winner.name,), time.monotonic() - began, detail))
        if params is None:
            # The bytes are in the request: the decoder computes what the prefill did not.
            return outgoing.fields
        staged.prefilled = computes
        return decode_request(outgoing.fields, params)

    def _note(self, staged: Staged, note: Note) -> None:
        staged.notes.append(note)
        self.count(note)

    def count(self, note: Note) -> None:
        """Count how a stage went."""
        outcome = "answered" if note.outcome.startswith("answered_") else note.outcome
        self._metrics.chain.labels(note.stage, outcome).inc()
        if note.outcome == "done":
            self._metrics.chain_seconds.labels(note.stage).observe(note.seconds)


def _remaining(prepared: Prepared, decision: Decision) -> int:
    """Tokens of the prompt that the chosen engine has to compute or be given."""
    winner = decision.choice.winner
    held = winner.overlap * decision.target.block_size if winner.scored else 0
    return max(0, len(prepared.ids) - held)


def _uncovered(prepared: Prepared, outgoing: Outgoing, computes: Decision) -> list[Shown]:
    """Return the images, each once, of which the computing engine lacks a block."""
    held = len(prepared.ids) - _remaining(prepared, computes)
    found: dict[str, Shown] = {}
    spans = prepared.spans or (None,) * len(prepared.images)  # none where the prompt could not be predicted
    for image, span, sent in zip(prepared.images, spans, outgoing.images, strict=True):
        if span is None or span.end > held:
            found.setdefault(sent.uuid, Shown(Image(image.identity, image.tokens), sent))
    return list(found.values())
