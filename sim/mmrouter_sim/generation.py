"""One generation of a simulated engine: prompt in, tokens out, whole or as server-sent events."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from tokenizers.decoders import DecodeStream

from mmrouter_sim.core.requests import Request
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, json_response
from mmrouter_sim.rank_runner import Aborted, Runner
from mmrouter_sim.vllm.requests import Generation, Prompt, StreamOptions

T = TypeVar("T")


@dataclass(slots=True)
class Piece:
    """One token of an answer: the text that it completes, and its finish reason if it is the last one."""

    token: int
    text: str
    finished: str | None
    stop_reason: int | str | None


@dataclass
class Job(ABC):
    """One generation, ready to run. Engines add the shapes of usage, answers and chunks."""

    aborted: ClassVar[RequestError]
    """How a request ends that the engine aborts at its shutdown."""
    shows_usage: ClassVar[bool]
    """Whether every chunk has a field for usage."""

    engine: SimulatedEngine
    runner: Runner
    body: Generation
    prompt: Prompt
    request: Request
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        return hasattr(self.body, "messages")

    @abstractmethod
    def details(self) -> dict[str, Any] | None: ...

    @abstractmethod
    def answer(self, pieces: list[Piece]) -> dict[str, Any]: ...

    @abstractmethod
    def chunks(self) -> AsyncIterator[dict[str, Any]]: ...

    def usage(self) -> dict[str, Any]:
        """Return the usage so far, in the engine's order of keys."""
        prompt, answer = self.request.prompt_length, self.request.answer_length
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + answer,
            "completion_tokens": answer,
            "prompt_tokens_details": self.details(),
            "completion_tokens_details": None,
        }

    def head(self, kind: str) -> dict[str, Any]:
        model = self.body.model or self.engine.settings.served_names[0]
        return {"id": self.id, "object": kind, "created": self.created, "model": model}

    async def respond(self, http: HttpRequest) -> Response:
        """Run and answer; a disconnect of the client aborts the request. Raises :class:`RequestError`."""
        if self.body.stream:
            return StreamingResponse(self._frames(), media_type="text/event-stream")
        work = asyncio.create_task(self._collect())
        gone = asyncio.create_task(_disconnected(http))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            return json_response(self.answer(await work)) if work.done() else Response(status_code=499)
        except Aborted as error:
            raise self.aborted from error
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _collect(self) -> list[Piece]:
        return [piece async for piece in self.pieces()]

    async def _frames(self) -> AsyncIterator[bytes]:
        options = self.body.stream_options or StreamOptions()
        try:
            async for chunk in self.chunks():
                if self.shows_usage or options.include_usage:
                    chunk["usage"] = None
                yield _frame(chunk)
            if options.include_usage:
                kind = "chat.completion.chunk" if self.chat else "text_completion"
                yield _frame(self.head(kind) | {"choices": [], "usage": self.usage()})
        except Aborted:
            yield _frame(self.aborted.body())
        except RequestError as error:  # the answer has begun, so its status stays 200
            yield _frame({"error": {"object": "error"} | error.body()["error"]})
        yield b"data: [DONE]\n\n"

    async def pieces(self) -> AsyncIterator[Piece]:
        decoder = DecodeStream(skip_special_tokens=True)
        hold = max((len(stop) - 1 for stop in self.body.stops), default=0)  # characters that may begin a stop string
        text_so_far, given = "", 0
        async with aclosing(self.runner.generate(self.request)) as outputs:
            async for output in outputs:
                token, finished = output.token, output.finished
                reason: int | str | None = None
                if finished == "stop":
                    reason = None if token in self.engine.model.stop_ids else token
                else:
                    before = len(text_so_far)
                    text_so_far += decoder.step(self.engine.model.tokenizer, token) or ""
                    cut = _find_stop(text_so_far, before, self.body.stops)
                    if cut is not None:
                        (at, reason), finished = cut, "stop"
                        text_so_far = text_so_far[:at]
                        self.runner.scheduler.abort(self.request, "stop")
                end = len(text_so_far) if finished is not None else max(given, len(text_so_far) - hold)
                yield Piece(token, text_so_far[given:end], finished, reason)
                given = end
                if finished is not None:
                    break


def _find_stop(text: str, before: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the position of the first stop string that ends after ``before``, and that string."""
    positions = ((text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in stops)
    return min(((at, stop) for at, stop in positions if at >= 0), default=None)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _frame(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def render(engine: SimulatedEngine, make: Callable[[], T]) -> T:
    """Call a function in the renderer's thread, beside the steps. Raises :class:`RequestError`."""
    return await asyncio.get_running_loop().run_in_executor(engine.renderer, make)


def request_of(engine: SimulatedEngine, body: Generation, prompt: Prompt, name: str, **more: Any) -> Request:
    """Return a request inside the engine. Clients may reuse a ``name``; ids inside the engine are unique."""
    return Request(
        id=f"{name}-{uuid.uuid4().hex[:8]}",
        sample=engine.answers.sampler(prompt.ids, prompt.media, min_tokens=body.min_tokens, ends=not body.ignore_eos),
        media=prompt.media,
        salt=body.cache_salt,
        stop_ids=frozenset((*(body.stop_token_ids or ()), *(() if body.ignore_eos else engine.model.stop_ids))),
        **more,
    )
