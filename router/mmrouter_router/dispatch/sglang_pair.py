"""The prefill half of a request at a pair of SGLang engines (docs/engine-facts/sglang.md#prefill-decode).

The prefill and the decode engine get the request at once. The decode engine answers the client; the prefill engine's
answer is read to its end and dropped. Each engine waits for the other, so when one fails, the request at the other one
is aborted.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from mmrouter_lib.engines.sglang.stage_requests import (
    MeetingFields,
    decode_fields,
    failure_of,
    new_meeting,
    override_headers,
    prefill_fields,
)
from mmrouter_router.dispatch.stages import PREFILL_SECONDS, StageReport
from mmrouter_router.fleet.workers import Target
from mmrouter_router.http.engine_connection import Body, Sink, UpstreamError
from mmrouter_router.http.upstream import Answer
from mmrouter_router.request.prepared import CHAT, Outgoing, Prepared
from mmrouter_router.scheduling.candidates import NoWorkerError
from mmrouter_router.scheduling.placer import Booking, Decision, Placer
from mmrouter_router.scheduling.scoring import Policy
from mmrouter_router.telemetry.tracing import child_span

KEPT_BYTES: Final = 256 * 1024  # bytes of a prefill engine's answer that are kept: enough for any error
DRAIN_SECONDS: Final = 10.0  # time for a prefill engine's answer to end after the client's
ENGINE_BUSY: Final = frozenset({408, 429})  # statuses below 500 that are about the engine and not about the request

T = TypeVar("T")
SendHalf = Callable[[Target, Mapping[str, str], MeetingFields], Awaitable[Answer]]
"""Target, headers and where the pair meets -> answer, of one and the same request. Raises :class:`UpstreamError`."""


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
        send: SendHalf,
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

    def decode_fields(self, target: Target) -> MeetingFields:
        """Return the fields by which the decode engine finds this half."""
        return decode_fields(self._meeting, target.rank, target.worker.ranks)

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

    async def _compute(self, send: SendHalf, headers: Mapping[str, str]) -> None:
        target = self.decision.target
        with child_span("prefill", client=True) as span:
            span.set_attributes({"mmrouter.worker": target.worker.member.name})
            try:
                answer = await send(target, span.propagate(headers), prefill_fields(self._meeting))
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


async def half_of(outgoing: Outgoing, fields: MeetingFields) -> tuple[Body, dict[str, str]]:
    """Return body and headers of a request at one engine of a pair. SGLang reads the headers for chats only."""
    if outgoing.path == CHAT:
        return await outgoing.whole(), override_headers(fields)
    return await outgoing.written({**outgoing.fields, **fields}), {}


def _refused(status: int, body: bytes) -> PrefillError:
    message, code = f"answered {status}", f"answered_{status}"
    if status < 500 and status not in ENGINE_BUSY:
        return PrefillError(code, message, refusal=PrefillRefusal(status, body))
    return PrefillError("busy" if status == 503 else "prefill", message, code=code)
