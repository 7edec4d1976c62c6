"""What clients are answered beside an engine's own bytes: errors, debug headers, chats in the form of other APIs."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple

import orjson

from mmrouter_lib.engines.base.request_fields import MESSAGES
from mmrouter_router.core.errors import FieldOf, RequestError
from mmrouter_router.core.request_ids import NAME_HEADER
from mmrouter_router.dispatch.continued_stream import ContinuedStream
from mmrouter_router.dispatch.engine_client import EngineReply
from mmrouter_router.http.client_channel import Client, Headers
from mmrouter_router.http.engine_connection import Sink
from mmrouter_router.intake import CHAT_FIELDS, COUNT_TOKENS, ChatRequest
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.streams.chat_events import ChatEventConverter
from mmrouter_router.streams.messages import MessageStream, error_body, message_of
from mmrouter_router.streams.responses import ResponseStream, response_of

MESSAGE_PATHS: Final = frozenset({MESSAGES, COUNT_TOKENS})
MESSAGE_ID: Final = b"request-id"  # the header that Anthropic's clients read
MAX_CONVERTED: Final = 64 << 20  # bytes of an answer that is converted as a whole


def debug_headers(reply: EngineReply) -> Headers:
    """Return the headers that disclose what other tenants asked, by the overlap (docs/architecture.md)."""
    decision = reply.decision
    winner, tokens = decision.choice.winner, reply.trace.prompt_tokens
    recomputed = decision.target.worker.layout.recomputed_blocks(tokens, decision.target.block_size)
    return [
        (b"x-mmrouter-worker", decision.target.worker.member.name.encode()),
        (b"x-mmrouter-answers", (reply.trace.answers or decision.target.worker.member.name).encode()),
        (b"x-mmrouter-exactness", decision.exactness.encode()),
        (b"x-mmrouter-overlap-blocks", str(winner.overlap).encode()),
        *([(b"x-mmrouter-unproved-blocks", str(winner.unproved).encode())] if winner.unproved else []),
        *([(b"x-mmrouter-tier-blocks", str(winner.tier).encode())] if decision.target.worker.lower_media else []),
        (b"x-mmrouter-prompt-blocks", str(winner.blocks).encode()),
        (b"x-mmrouter-block-size", str(decision.target.block_size).encode()),
        (b"x-mmrouter-prompt-tokens", str(tokens).encode()),
        (b"x-mmrouter-recomputed-blocks", str(recomputed).encode()),
    ]


async def refuse(client: Client, error: RequestError, extra: Headers) -> None:
    """Answer an error in the shape of the route's API."""
    body = error.to_body()
    if client.path in MESSAGE_PATHS:
        body = error_body(error, next((value.decode() for name, value in extra if name == NAME_HEADER), ""))
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await respond_json(client, error.status, [*headers, *extra], body)


async def respond_json(client: Client, status: int, extra: Headers, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await client.respond(status, [*headers, *extra], body)


class AnswerForm(NamedTuple):
    """How the answer to a chat becomes that of the API by which the request came: ``whole``, or event by event."""

    whole: Callable[[Any], Any]
    stream: Callable[[], ChatEventConverter]


def form_of(path: str, prepared: Prepared) -> AnswerForm | None:
    """Return the form of an answer, ``None`` where the client gets the engine's bytes."""
    if path == MESSAGES:
        return AnswerForm(message_of, partial(MessageStream, len(prepared.ids)))
    request = prepared.request.response
    if request is None:
        return None
    return AnswerForm(partial(response_of, request=request), partial(ResponseStream, request))


async def respond_converted(
    client: Client,
    reply: EngineReply,
    form: AnswerForm,
    extra: Headers,
    run: Callable[[int, Callable[[], bytes]], Awaitable[bytes]],
) -> None:
    """Answer a whole chat in another form, which ``run`` makes beside the event loop where its bytes are many.

    Raises :class:`RequestError` for an answer that is none.
    """
    raw = bytearray(reply.first)
    while len(raw) < MAX_CONVERTED and (piece := await reply.answer.piece()):
        raw += piece
    try:
        body = await run(len(raw), lambda: orjson.dumps(form.whole(orjson.loads(raw))))
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError) as error:
        message = "The engine's answer cannot be read."
        raise RequestError(502, message, type="server_error", code="engine_error") from error
    await respond_json(client, 200, extra, body)


def engine_error(request: ChatRequest, status: int, raw: bytes, field_of: FieldOf, hidden: set[str]) -> RequestError:
    """Return an engine's error for the client, whose field it names even where the engine got a chat instead."""
    error = RequestError.from_engine(status, raw, field_of, hidden)
    if request.response is not None and error.param is not None:
        error.param = CHAT_FIELDS.get(error.param.partition("[")[0].partition(".")[0], error.param)
    return error


def counted(prepared: Prepared) -> bytes:
    """Return the answer of :data:`COUNT_TOKENS`. Raises :class:`RequestError` for a prompt that is not predicted."""
    if not prepared.ids:
        message = f"The tokens of this request cannot be counted: {', '.join(prepared.reasons)}."
        raise RequestError.invalid(message, code="not_counted")
    return orjson.dumps({"input_tokens": len(prepared.ids)})


class ConvertedSource:
    """The source of a stream in another form, made from a chat's."""

    def __init__(self, chat: ContinuedStream, converter: ChatEventConverter) -> None:
        self._chat, self._converter = chat, converter
        self.first = converter.feed(chat.first)

    def remaining(self) -> None:
        """Return ``None``: more bytes of a stream can always follow."""

    async def piece(self) -> bytes:
        while events := await self._chat.piece():
            if made := self._converter.feed(events):
                return made
        return b""

    async def pour(self, sink: Sink) -> None:
        await self._chat.pour(_Converted(sink, self._converter))


class _Converted:
    """A sink that passes a chat's events on in another form."""

    def __init__(self, sink: Sink, converter: ChatEventConverter) -> None:
        self._sink, self._converter = sink, converter

    @property
    def full(self) -> bool:
        return self._sink.full

    def when_writable(self, callback: Callable[[], None] | None) -> None:
        self._sink.when_writable(callback)

    def write(self, piece: bytes) -> None:
        if made := self._converter.feed(piece):
            self._sink.write(made)
