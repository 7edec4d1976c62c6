"""Drives an endpoint picker over gRPC as a gateway's Envoy does: its messages, and the engine's answers.

It uses no part of a picker but the declarations of the messages.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from mmrouter_router.picker.wire import (
    EXT_PROC_SERVICE,
    FULL_DUPLEX_STREAMED,
    HEALTH_SERVICE,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)

DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
LIMIT = 64 * 1024  # bytes of a message's body
SECONDS = 60.0  # without a message after which a picker hangs

Message = Any
Metadata = dict[str, dict[str, Any]]


def headers(path: str = "/v1/chat/completions", method: str = "POST", *, end: bool = False, **more: str) -> Message:
    """The first message of a stream. ``more``: headers, with ``_`` for ``-``."""
    made = ProcessingRequest()
    own = {":method": method, ":path": path, ":scheme": "http", ":authority": "model.example"}
    own |= {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in more.items()}
    _fill(made.request_headers, own, end)
    made.protocol_config.request_body_mode = made.protocol_config.response_body_mode = FULL_DUPLEX_STREAMED
    return made


def hinted(metadata: Metadata, *messages: Message) -> list[Message]:
    """Give a request's messages the gateway's metadata: Envoy sends it with each of them."""
    return [with_metadata(message, metadata) for message in messages]


def with_metadata(message: Message, metadata: Metadata) -> Message:
    for namespace, values in metadata.items():
        entry = message.metadata_context.filter_metadata.add(key=namespace)
        entry.value.update(values)
    return message


def subset(*endpoints: str, as_list: bool = True) -> Metadata:
    return {"envoy.lb.subset_hint": {SUBSET: list(endpoints) if as_list else ",".join(endpoints)}}


def body(data: bytes, *, size: int = LIMIT, kind: str = "request_body", end: bool = True) -> list[Message]:
    pieces = [data[start : start + size] for start in range(0, len(data), size)] or [b""]
    return [_body(kind, piece, end and number == len(pieces) - 1) for number, piece in enumerate(pieces)]


def answer_headers(status: int = 200, *, end: bool = False, **more: str) -> Message:
    made = ProcessingRequest()
    own = {":status": str(status), "content-type": "application/json"}
    _fill(made.response_headers, own | {name.replace("_", "-"): value for name, value in more.items()}, end)
    return made


def trailers(kind: str) -> Message:
    made = ProcessingRequest()
    getattr(made, kind).trailers.headers.add(key="x-sum", raw_value=b"1")
    return made


@dataclass
class Outcome:
    """What a picker answered. ``code``: of the stream's end, ``None`` where it ended while something was written: then
    gRPC's client reports its failed write instead of the picker's code.
    """

    messages: list[Message] = field(default_factory=list)
    code: grpc.StatusCode | None = None

    @property
    def kinds(self) -> list[str]:
        return [message.WhichOneof("kind") for message in self.messages]

    @property
    def immediate(self) -> Any:
        assert self.kinds == ["immediate_response"], self.kinds
        return self.messages[0].immediate_response

    @property
    def refusal(self) -> tuple[int, dict[str, Any]]:
        """Status and error of an immediate answer in OpenAI's shape."""
        answer = self.immediate
        return answer.status.code, json.loads(answer.body)["error"]

    def set_headers(self, kind: str = "request_headers") -> dict[str, str]:
        message = next(message for message in self.messages if message.WhichOneof("kind") == kind)
        changed = getattr(message, kind)
        mutation = changed.headers if kind == "immediate_response" else changed.response.header_mutation
        return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}

    @property
    def destination(self) -> str:
        return self.set_headers()[DESTINATION]

    def body(self, kind: str = "request_body") -> bytes:
        return b"".join(piece.body for piece in self.pieces(kind))

    def pieces(self, kind: str = "request_body") -> list[Any]:
        found = [message for message in self.messages if message.WhichOneof("kind") == kind]
        return [getattr(message, kind).response.body_mutation.streamed_response for message in found]


class Talk:
    """One stream to a picker."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._cut = False  # a write failed
        self.outcome = Outcome()

    async def send(self, *messages: Message) -> None:
        try:
            for message in messages:
                await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self._cut = True
            raise

    async def receive(self, count: int = 1) -> Message:
        """Return the last of the next ``count`` messages."""
        for _ in range(count):
            async with asyncio.timeout(SECONDS):
                message = await self._call.read()
            assert message is not grpc.aio.EOF, f"the picker ended the stream after {self.outcome.kinds}"
            self.outcome.messages.append(message)
        return self.outcome.messages[-1]

    async def until_body_ends(self, kind: str) -> None:
        while True:
            message = await self.receive()
            if message.WhichOneof("kind") != kind:
                continue
            if getattr(message, kind).response.body_mutation.streamed_response.end_of_stream:
                return

    async def finish(self) -> Outcome:
        """Send nothing more, and return everything up to the end of the stream."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # ended by the picker: see the code
            await self._call.done_writing()
            async with asyncio.timeout(SECONDS):
                while (message := await self._call.read()) is not grpc.aio.EOF:
                    self.outcome.messages.append(message)
        code = await self._call.code()
        self.outcome.code = None if self._cut and code is grpc.StatusCode.INTERNAL else code
        return self.outcome

    def cancel(self) -> None:
        """End the stream as Envoy does where the client or the engine is gone."""
        self._call.cancel()


class Driver:
    """A gateway's connection to a picker."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self._process = self._channel.stream_stream(
            f"/{EXT_PROC_SERVICE}/Process",
            request_serializer=_serialized,
            response_deserializer=ProcessingResponse.FromString,
        )
        self._check = self._channel.unary_unary(
            f"/{HEALTH_SERVICE}/Check",
            request_serializer=_serialized,
            response_deserializer=HealthCheckResponse.FromString,
        )

    async def close(self) -> None:
        await self._channel.close()

    def talk(self) -> Talk:
        return Talk(self._process())

    async def ask(self, messages: Iterable[Message]) -> Outcome:
        """Send these messages of a request and return what the picker answers to it."""
        talk = self.talk()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # a refusal before the request's end
            await talk.send(*messages)
        return await talk.finish()

    async def health(self, service: str) -> int:
        answer = await self._check(HealthCheckRequest(service=service))
        return int(answer.status)


def out_of_order(outcome: Outcome) -> str:
    """Return what is wrong with the order of a picker's messages by the rules of full duplex, empty if nothing is.

    Per direction: headers once, then the body, then nothing behind its end. An immediate answer is the last message.
    """
    seen: dict[str, str] = {}  # direction -> the last part
    for number, kind in enumerate(outcome.kinds):
        if kind == "immediate_response":
            if number != len(outcome.kinds) - 1:
                return "a message behind an immediate answer"
            continue
        direction, _, part = kind.partition("_")
        before = seen.get(direction, "")
        allowed: Sequence[str] = {"headers": ("",), "body": ("headers", "body"), "trailers": ("headers", "body")}[part]
        if before not in allowed:
            return f"{kind} behind {before or 'nothing'}"
        if direction == "response" and "request" not in seen:
            return f"{kind} before the answer to the request"
        seen[direction] = part
        message = outcome.messages[number]
        if part == "body":
            piece = getattr(message, kind).response.body_mutation.streamed_response
            if len(piece.body) > LIMIT:
                return f"{len(piece.body)} bytes in one message"
            if piece.end_of_stream:
                seen[direction] = "end"
    return ""


def _fill(part: Any, values: dict[str, str], end: bool) -> None:
    for name, value in values.items():
        part.headers.headers.add(key=name, raw_value=value.encode())
    part.end_of_stream = end


def _body(kind: str, data: bytes, end: bool) -> Message:
    made = ProcessingRequest()
    part = getattr(made, kind)
    part.body, part.end_of_stream = data, end
    return made


def _serialized(message: Message) -> bytes:
    return bytes(message.SerializeToString())
