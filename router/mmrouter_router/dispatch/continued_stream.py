"""A client's stream whose engine may change (docs/streams.md).

Where the engine's stream breaks, another engine continues the answer from its token ids, or repeats it and the client
gets what it does not have yet; a seed makes a sampled answer repeatable. The first engine's bytes pass through unread.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from mmrouter_lib.engines.base.answer_takeover import AnswerTraits, TokenContinuation, Way
from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.worker_threads import WorkerThreads
from mmrouter_router.dispatch.engine_client import EngineReply
from mmrouter_router.dispatch.forwarder import AttemptHistory, Forwarder
from mmrouter_router.dispatch.stages import ForwardCall
from mmrouter_router.explain.decisions import DecisionTrace
from mmrouter_router.http.engine_connection import Sink, UpstreamError
from mmrouter_router.http.upstream import Answer
from mmrouter_router.streams import continuable
from mmrouter_router.streams.answer import (
    DONE,
    Chunk,
    DivergedError,
    EngineFaultError,
    StreamedAnswer,
    UnreadableError,
    split,
)
from mmrouter_router.streams.continuable import CONTINUED, MAX_CONTINUATIONS, REFUSALS, Cause, Refusal
from mmrouter_router.streams.kept import STREAM_BYTES, KeptBytes, KeptStream
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.tracing import child_span

log = logging.getLogger("mmrouter.streams")

_DEATHS: Final = frozenset({"engine_lost", "stalled"})
_SEED_BITS: Final = 62  # engines take 64 bits with a sign, and add the number of a choice

OnMoved = Callable[[str, DecisionTrace], None]
"""Request id and the trace of the engine that continues."""


class Continuations:
    """Makes streams that can move to another engine.

    ``enabled``: ``spec.routing.continueStreams``. ``seeds``: ``spec.routing.seedStreams``.
    """

    def __init__(
        self,
        forwarder: Forwarder,
        metrics: Metrics,
        threads: WorkerThreads,
        *,
        enabled: bool,
        seeds: bool,
        traits: AnswerTraits,
        by_tokens: TokenContinuation | None = None,
    ) -> None:
        """``traits``: of the engines. ``by_tokens``: how they continue token ids, ``None`` where they do not."""
        self.forwarder, self.metrics, self.threads, self.by_tokens = forwarder, metrics, threads, by_tokens
        self.kept = KeptBytes()
        self._enabled, self._traits = enabled, traits
        self._seeds = seeds and traits.reproducible == "seeded"

    def plan(self, path: str, fields: Mapping[str, Any]) -> tuple[Way | None, Mapping[str, Any]]:
        """Return how the stream of a request can be continued, and the fields that the engine needs for that."""
        way, _ = self._way(path, fields) if fields.get("stream") is True else (None, None)
        if way == "token_ids" and self.by_tokens is not None:
            return way, self.by_tokens.reporting
        return way, {"seed": secrets.randbits(_SEED_BITS)} if way == "seeded" else {}

    def _way(self, path: str, fields: Mapping[str, Any]) -> tuple[Way | None, Refusal | None]:
        """Return how a stream can be continued, or why not."""
        if not self._enabled:
            return None, "off"
        if path not in CONTINUED:
            return None, "route"
        if continuable.is_reproducible(fields, self._traits):
            return "repeated", None
        if self.by_tokens is None:
            return None, "engine"
        obstacle = self.by_tokens.obstacle(path, fields) or ("reasoning" if self._traits.reasoning else None)
        if obstacle is None:
            return "token_ids", None
        # With one seed, several equal prompts would get equal answers.
        return ("seeded", None) if self._seeds and obstacle != "prompts" else (None, obstacle)

    def open(self, call: ForwardCall, past: AttemptHistory, reply: EngineReply, on_moved: OnMoved) -> "ContinuedStream":
        """Return the stream of an answer, which owns the reply from here on."""
        outgoing = call.outgoing
        way, refusal = (outgoing.way, None) if outgoing.way else self._way(outgoing.path, outgoing.fields)
        if call.gateway is not None:
            way, refusal = None, "gateway"
        reply.trace.stream = way or refusal or ""
        return ContinuedStream(self, call, past, reply, on_moved, refusal)


class ContinuedStream:
    """The source of a client's stream, and the sink of its engines'. Call ``close`` in every case.

    ``failed``: it ended with an error event. ``reply``: of the engine that streams now.
    """

    def __init__(
        self,
        owner: Continuations,
        call: ForwardCall,
        past: AttemptHistory,
        reply: EngineReply,
        on_moved: OnMoved,
        refusal: Refusal | None,
    ) -> None:
        self.reply, self.failed = reply, False
        self._owner, self._call, self._past = owner, call, past
        self._on_moved, self._refusal = on_moved, refusal
        self._kept = KeptStream(owner.kept, 0 if refusal else STREAM_BYTES)
        self._by_tokens = owner.by_tokens if call.outgoing.way == "token_ids" else None
        self._convert: Callable[[Chunk], Chunk] | None = None  # of an engine that continues token ids
        self._answer: StreamedAnswer | None = None  # what the client has, from the first break on
        self._moves = 0
        self._cause: Cause | None = None  # of the last break, until it is counted
        self._over = False
        self._sink: Sink = _Collected()
        self._changes = self._by_tokens is not None  # whether the events for the client differ from the engine's
        self.first = self._changed(self._kept.take(reply.first))

    # -- source

    def remaining(self) -> None:
        """Return ``None``: more bytes of a stream can always follow."""

    async def pour(self, sink: Sink) -> None:
        """Write the stream to a sink; return at its end, which may be an error event."""
        self._sink = sink
        while not self._over:
            error: UpstreamError | None = None
            try:
                await self.reply.answer.pour(self)
            except UpstreamError as broken:
                error = broken
            await self._end_of_answer(error)

    async def piece(self) -> bytes:
        """Return the next bytes, empty at the end."""
        self._sink = collected = _Collected()
        while not collected.pieces and not self._over:
            piece, error = b"", None
            try:
                piece = await self.reply.answer.piece()
            except UpstreamError as broken:
                error = broken
            if piece:
                self.write(piece)
            else:
                await self._end_of_answer(error)
        return b"".join(collected.pieces)

    def close(self) -> None:
        self._count("client_gone")
        self._kept.release()
        self.reply.close()

    # -- sink of the engine

    @property
    def full(self) -> bool:
        return self._sink.full

    def when_writable(self, callback: Callable[[], None] | None) -> None:
        self._sink.when_writable(callback)

    def write(self, piece: bytes) -> None:
        """Pass on the whole events of a piece; end the connection at an event that reports a failure."""
        events = self._kept.take(piece)
        if self._changes or self._kept.failed:
            events = self._changed(events)
        if events:
            self._sink.write(events)

    def _changed(self, events: bytes) -> bytes:
        if self._answer is not None and events:
            events = self._merged(self._answer, events)
        if self._kept.failed and isinstance(self.reply.answer, Answer):
            self.reply.answer.connection.close()
        return events if self._by_tokens is None else self._by_tokens.strip(events)

    def _merged(self, answer: StreamedAnswer, events: bytes) -> bytes:
        """Return these events without the part that the client already has."""
        new: list[bytes] = []
        try:
            new += (answer.merge(event, self._convert) for event in split(events))
        except DivergedError:
            self._refusal, self._kept.failed = "diverged", True
        except UnreadableError:
            self._refusal, self._kept.failed = "unreadable", True
        except EngineFaultError:
            self._kept.failed = True
        if answer.reproduced and not self._kept.failed:
            self._count("continued")
        return b"".join(new)

    # -- breaks

    async def _end_of_answer(self, error: UpstreamError | None) -> None:
        """Continue an incomplete answer on another engine, or end the stream with an error event."""
        cause = self._why_broken(error)
        if cause is None:
            self._over = True
            return
        refusal = await self._move(cause)
        if refusal is None:
            if not self._over:
                self.write(self.reply.first)
            return
        self._count(refusal)
        self.reply.trace.add_attempt(self.reply.decision, f"stream not continued: {refusal}")
        log.warning("%s: stream ended: %s, %s", self._call.request_id, cause, refusal)
        self.failed = self._over = True
        self._sink.write(_error_event(self._call.outgoing.path, refusal))

    def _why_broken(self, error: UpstreamError | None) -> Cause | None:
        if self._kept.failed:
            return "engine_failed"
        if self._kept.complete:
            return None
        if error is None:
            return "ended_early" if self._call.outgoing.path in CONTINUED else None
        answer = self.reply.answer
        return "stalled" if isinstance(answer, Answer) and answer.connection.stalled else "engine_lost"

    async def _move(self, cause: Cause) -> Refusal | None:
        """Send the request to another engine; return the reason if that is not possible."""
        reply, past = self.reply, self._past
        if self._refusal in ("diverged", "unreadable"):
            return self._refusal
        self._count("interrupted")
        self._cause = cause
        reply.span.fail(cause)
        reply.close()
        reply.trace.add_attempt(reply.decision, f"stream broke: {cause}")
        draining = past.answers is not None and past.answers.draining
        past.deaths += cause in _DEATHS and not draining
        if self._refusal is not None:
            return self._refusal
        if self._moves == MAX_CONTINUATIONS:
            return "limit"
        self._moves += 1
        with child_span("continue") as span:
            span.set_attributes({"mmrouter.cause": cause, "mmrouter.continuation": self._moves})
            refusal = await self._repeat()
            if refusal is not None:
                span.fail(refusal)
        return refusal

    async def _repeat(self) -> Refusal | None:
        owner = self._owner
        if self._answer is None:
            events = self._kept.events()
            if events is None:
                return "too_long"
            try:
                self._answer = await owner.threads.run("", len(events), StreamedAnswer.read, events)
            except (DivergedError, UnreadableError, EngineFaultError):
                return "unreadable"
            self._kept.release()
        self._changes = True
        call, answer = self._call, self._answer
        if self._by_tokens is None:
            answer.restart()
        elif answer.finished:  # only its last events are missing
            options = call.outgoing.fields.get("stream_options") or {}
            self._sink.write(answer.ending(with_usage=options.get("include_usage") is True))
            self._over = True
            self._count("continued")
            return None
        elif answer.begun:  # else the client has nothing, and any answer is right
            call = replace(call, answer=answer)
        self._kept = KeptStream(owner.kept, 0)
        try:
            reply = await owner.forwarder.send(call, self._past)
        except RequestError as error:
            return error.code if error.code in REFUSALS else "engine_refused"  # type: ignore[return-value]
        self.reply, reply.trace.stream = reply, self.reply.trace.stream
        if (way := self._by_tokens) is not None and call.answer is not None:
            outgoing, sent = call.outgoing, len(answer.ids)
            self._convert = lambda data: way.as_chunk(data, outgoing.path, outgoing.fields, sent)
        if not reply.is_stream:
            return "engine_refused"
        self._on_moved(self._call.request_id, reply.trace)
        return None

    def _count(self, outcome: str) -> None:
        """Count the outcome of the last break, once."""
        if self._cause is not None:
            self._owner.metrics.stream_breaks.labels(self._cause, outcome).inc()
            self._cause = None


class _Collected:
    """A sink that keeps what is written."""

    full = False

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def when_writable(self, callback: Callable[[], None] | None) -> None:
        """Never calls back, because this sink is never full."""

    def write(self, piece: bytes) -> None:
        self.pieces.append(piece)


def _error_event(path: str, refusal: Refusal) -> bytes:
    """Return the error event and the last event, which end a stream that is not continued."""
    error = RequestError(500, continuable.describe(refusal), type="server_error", code=f"stream_{refusal}")
    if path in CONTINUED:
        return b"data: " + error.to_body() + b"\n\n" + DONE
    return b"event: error\ndata: " + error.to_event() + b"\n\n"
