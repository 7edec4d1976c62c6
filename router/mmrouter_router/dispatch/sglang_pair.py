"""Requests that a prefill and a decode engine of SGLang serve together: both get them at once.

See docs/engine-facts/sglang.md#prefill-decode.

The decode engine answers the client. The prefill engine's answer is read to its end and dropped. Each waits for the
other, so when one fails, the other one's request is ended at once: its partner never comes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from mmrouter_lib.engines.sglang.disaggregation import decode_headers, failure_of, new_meeting, prefill_headers
from mmrouter_router.dispatch.stages import PREFILL_SECONDS, Note
from mmrouter_router.fleet.workers import Target
from mmrouter_router.http.upstream import Answer, Sink, UpstreamError
from mmrouter_router.request.prepare import Prepared
from mmrouter_router.scheduling.placer import Booking, Decision, NoWorkerError, Placer
from mmrouter_router.scheduling.scoring import Policy
from mmrouter_router.telemetry.tracing import stage

KEPT_BYTES: Final = 256 * 1024
"""Of a prefill engine's answer: enough for any error, and for the one token of an answer that nobody gets."""
DRAIN_SECONDS: Final = 10.0
"""For how long a prefill engine's answer may end after the client's has."""
THEIRS: Final = frozenset({408, 429})
"""Statuses below 500 that are about the engine and not about the request."""

T = TypeVar("T")
Send = Callable[[Target, Mapping[str, str]], Awaitable[Answer]]
"""Target and headers -> answer, of one and the same request. Raises :class:`UpstreamError`."""


@dataclass(frozen=True)
class Refusal:
    """A prefill engine's error that the client is told: the request is at fault."""

    status: int
    body: bytes
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    complete: bool = True

    async def piece(self) -> bytes:
        """Return what follows: nothing, all of it is in ``body``."""
        return b""

    def remaining(self) -> bytes:
        """Return what follows: nothing."""
        return b""

    async def pour(self, sink: Sink) -> None:
        """Write what follows: nothing."""

    def close(self) -> None:
        """Its connection was given back when it had been read."""


class PrefillError(Exception):
    """A prefill engine failed before the answer began. ``cause`` is one of few words, ``died``: the engine ended.

    ``code``: what its span is told.
    """

    def __init__(
        self, cause: str, message: str, *, died: bool = False, refusal: Refusal | None = None, code: str = ""
    ) -> None:
        super().__init__(message)
        self.cause, self.died, self.refusal, self.code = cause, died, refusal, code or cause


class Prefill:
    """A prefill engine's half of one request, under way from the start. Call ``end`` in every case.

    ``seconds``: when neither half has come to anything by then, this one is given up.
    """

    def __init__(
        self,
        decision: Decision,
        booking: Booking,
        send: Send,
        headers: Mapping[str, str],
        seconds: float = PREFILL_SECONDS,
    ) -> None:
        self.decision, self._booking, self._patience = decision, booking, seconds
        target = decision.target
        self._meeting = new_meeting(target.worker.member.ip, target.rank, target.worker.ranks)
        self._began = time.monotonic()
        self._seconds: float | None = None
        self._task = asyncio.create_task(self._compute(send, headers), name=f"prefill {target.worker.member.name}")
        self._task.add_done_callback(self._done)

    def told(self, target: Target) -> dict[str, str]:
        """Headers by which the decode engine finds this half."""
        return decode_headers(self._meeting, target.rank, target.worker.ranks)

    async def beside(self, answering: Coroutine[Any, Any, T], drop: Callable[[T], None]) -> T:
        """Return what the decode engine's half brings; ends it and raises :class:`PrefillError` when this one fails.

        ``drop`` is called with what nobody gets any more.
        """
        work = asyncio.create_task(answering)
        try:
            halves = (work, self._task)
            done, _ = await asyncio.wait(halves, timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self.end()
                raise PrefillError("timeout", f"nothing came of it within {self._patience:g} s")
            if not work.done():
                self._task.result()
                await asyncio.wait((work,))
            return work.result()
        except BaseException:  # cancelled or failed: the other half's answer has nobody who takes it
            work.cancel()
            (left,) = await asyncio.gather(work, return_exceptions=True)
            if not isinstance(left, BaseException):
                drop(left)
            raise

    def note(self, outcome: str) -> Note:
        """What is told of this half. It is done at the latest when the decode engine has what it computed."""
        winner = self.decision.choice.winner
        seconds = self._seconds if self._seconds is not None else time.monotonic() - self._began
        detail = {"overlap": winner.overlap, "blocks": winner.blocks, "why": self.decision.choice.reason}
        return Note("prefill", outcome, (winner.name,), seconds, detail)

    def end(self, *, whole: bool = False) -> None:
        """Nobody waits any more. ``whole``: the client has its answer, so this one ends by itself, or is made to."""
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
            task.exception()  # whoever waits gets it; nobody may be left

    async def _compute(self, send: Send, headers: Mapping[str, str]) -> None:
        target = self.decision.target
        with stage("prefill", client=True) as span:
            span.tell({"mmrouter.worker": target.worker.member.name})
            try:
                answer = await send(target, {**span.passed_on(headers), **prefill_headers(self._meeting)})
                try:
                    said = await _drained(answer)
                finally:
                    answer.close()
            except UpstreamError as error:
                cause = "engine_lost" if error.sent else "connect"
                raise PrefillError(cause, str(error), died=error.sent) from error
            if (failure := failure_of(answer.status, said)) is not None:
                raise _refused(failure.status, failure.body)


def choose(
    placer: Placer,
    prepared: Prepared,
    roles: Collection[str],
    *,
    tried: Collection[str] = (),
    failed: Collection[str] = (),
    policy: Policy | None = None,
    dry_run: bool = False,
) -> tuple[Decision, Decision | None]:
    """Return who answers, and who computes the prompt where that takes a pair.

    ``tried``: pods that are not to answer, ``failed``: that are not to prefill. A decode engine to which no prefill
    engine is left is passed over. Raises :class:`NoWorkerError`.
    """
    lonely: set[str] = set()
    why: NoWorkerError | None = None
    while True:
        try:
            decision = placer.place(prepared, exclude={*tried, *lonely}, policy=policy, roles=roles, dry_run=dry_run)
        except NoWorkerError as error:
            raise why or error from None
        worker = decision.target.worker
        if worker.member.role != "decode":
            return decision, None
        try:
            computes = placer.place(
                prepared, exclude=failed, policy=policy, roles=("prefill",), partner=worker, dry_run=dry_run
            )
        except NoWorkerError as error:
            why = error
            lonely.add(worker.member.uid)
        else:
            return decision, computes


async def _drained(answer: Answer) -> bytes:
    """Read an answer to its end; return its beginning."""
    kept = b""
    async for piece in answer.body():
        if len(kept) < KEPT_BYTES:
            kept += piece
    return kept


def _refused(status: int, body: bytes) -> PrefillError:
    message, code = f"answered {status}", f"answered_{status}"
    if status < 500 and status not in THEIRS:
        return PrefillError(code, message, refusal=Refusal(status, body))
    return PrefillError("busy" if status == 503 else "prefill", message, code=code)
