"""One generation of a simulated engine: prompt in, tokens out, whole or as server-sent events."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from tokenizers.decoders import DecodeStream

from mmrouter_sim.constraints.constrained_text import formed_text
from mmrouter_sim.constraints.shortest import FormError
from mmrouter_sim.core.requests import Request
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, json_response
from mmrouter_sim.rank_runner import Aborted, Runner
from mmrouter_sim.vllm.requests import Generation, Prompt, StreamOptions, last_words

T = TypeVar("T")
LIKELY = -0.125
"""The logarithm of every token's probability."""


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
    names_calls: ClassVar[bool] = False
    """Whether an answer to a named function ends with ``tool_calls``."""
    shows_usage: ClassVar[bool]
    """Whether every chunk has a field for usage."""

    engine: SimulatedEngine
    runner: Runner
    body: Generation
    prompt: Prompt
    request: Request
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    others: "Sequence[Job]" = ()
    """Further generations that are part of the same answer: ``n`` for each prompt."""
    n: int = 1

    @property
    def chat(self) -> bool:
        return hasattr(self.body, "messages")

    @cached_property
    def called(self) -> dict[str, Any] | None:
        """The function that the answer of a chat calls."""
        return function_called(self.engine, self.body) if self.chat else None

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

    def total(self) -> dict[str, Any]:
        """Return the usage of all generations; a prompt counts once."""
        jobs = (self, *self.others)
        if len(jobs) == 1:
            return self.usage()
        prompts = jobs[:: self.n]
        prompt = sum(job.request.prompt_length for job in prompts)
        answer = sum(job.request.answer_length for job in jobs)
        counted = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
        return {**self.usage(), **counted, "prompt_tokens_details": self.all_details(prompts)}

    def all_details(self, prompts: "Sequence[Job]") -> dict[str, Any] | None:
        """Return the details of several prompts: vLLM reports those of the last one."""
        return prompts[-1].details()

    def logprobs(self, pieces: Sequence[Piece], begins: int = 0) -> dict[str, Any] | None:
        """Return the probabilities of tokens, as far as the request asks for them. All are the most likely ones.

        ``begins``: the characters of the answer before them.
        """
        wanted, most = self.body.logprobs, self.body.top_logprobs
        if wanted is None or wanted is False:
            return None
        tokens = [self.engine.model.tokenizer.decode([piece.token], skip_special_tokens=False) for piece in pieces]
        if not self.chat:
            ends = list(accumulate((len(piece.text) for piece in pieces), initial=begins))
            return {
                "text_offset": ends[:-1],
                "token_logprobs": [LIKELY] * len(tokens),
                "tokens": tokens,
                "top_logprobs": [{token: LIKELY} for token in tokens] if wanted else None,
            }
        each = [{"token": token, "logprob": LIKELY, "bytes": list(token.encode())} for token in tokens]
        return {"content": [{**entry, "top_logprobs": [entry] if most else []} for entry in each]}

    def call(self, arguments: str, *, begins: bool = True) -> list[dict[str, Any]] | None:
        """Return the call of the function that the request asks for, or a part of its arguments."""
        called = self.called
        if called is None:
            return None
        if not begins:
            return [{"index": 0, "function": {"arguments": arguments}}]
        function = {"name": called["name"], "arguments": arguments}
        return [{"id": f"call_{self.request.id[-8:]}", "type": "function", "index": 0, "function": function}]

    def ended(self, finished: str | None) -> str | None:
        """Return why an answer ended: after a call that no function's name required, and of SGLang after any."""
        named = isinstance(self.body.tool_choice, dict) and not self.names_calls
        return "tool_calls" if self.called is not None and not named and finished == "stop" else finished

    def echoed(self) -> str:
        """Return the text of a completion's prompt where the answer repeats it."""
        return self.engine.model.tokenizer.decode(self.prompt.ids.tolist()) if self.body.echo and not self.chat else ""

    def head(self, kind: str) -> dict[str, Any]:
        model = self.body.model or self.engine.settings.served_names[0]
        return {"id": self.id, "object": kind, "created": self.created, "model": model}

    async def respond(self, http: HttpRequest) -> Response:
        """Run and answer; a disconnect of the client aborts the request. Raises :class:`RequestError`."""
        if self.body.stream:
            return StreamingResponse(self._frames(), media_type="text/event-stream")
        work = asyncio.create_task(self._whole())
        gone = asyncio.create_task(_disconnected(http))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            return json_response(await work) if work.done() else Response(status_code=499)
        except Aborted as error:
            raise self.aborted from error
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _whole(self) -> dict[str, Any]:
        jobs = (self, *self.others)
        answers = [
            job.answer(pieces)
            for job, pieces in zip(jobs, await asyncio.gather(*[job._collect() for job in jobs]), strict=True)
        ]
        if not self.others:
            return answers[0]
        choices = [choice for answer in answers for choice in answer["choices"]]
        numbered = [{**choice, "index": number} for number, choice in enumerate(choices)]
        return {**answers[0], "choices": numbered, "usage": self.total()}

    async def _all_chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of all generations as they come."""
        if not self.others:
            async for chunk in self.chunks():
                yield chunk
            return
        came: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

        async def run(number: int, job: Job) -> None:
            try:
                async for chunk in job.chunks():
                    choices = [{**choice, "index": number} for choice in chunk["choices"]]
                    await came.put({**chunk, "id": self.id, "choices": choices})
                await came.put(None)
            except Exception as error:  # ends the stream
                await came.put(error)

        tasks = [asyncio.create_task(run(number, job)) for number, job in enumerate((self, *self.others))]
        try:
            running = len(tasks)
            while running:
                item = await came.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _collect(self) -> list[Piece]:
        return [piece async for piece in self.pieces()]

    async def _frames(self) -> AsyncIterator[bytes]:
        options = self.body.stream_options or StreamOptions()
        try:
            async for chunk in self._all_chunks():
                if self.shows_usage or options.include_usage:
                    chunk["usage"] = None
                yield _frame(chunk)
            if options.include_usage:
                kind = "chat.completion.chunk" if self.chat else "text_completion"
                yield _frame(self.head(kind) | {"choices": [], "usage": self.total()})
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


def function_called(engine: SimulatedEngine, body: Generation) -> dict[str, Any] | None:
    """Return the function that an answer calls: the named one, or the first where any is required.

    Where the engine has a parser of tool calls and may choose, it is the first one that the last message of the user
    names, if that is the last message.
    """
    functions = [tool["function"] for tool in body.tools or () if isinstance(tool.get("function"), dict)]
    match body.tool_choice:
        case {"function": {"name": name}}:
            functions = [function for function in functions if function.get("name") == name]
        case None | "auto":
            words = last_words(body) if functions and engine.settings.calls_tools else ()
            functions = [function for function in functions if function.get("name") in words]
        case "required":
            pass
        case _:
            return None
    return functions[0] if functions else None


def request_of(engine: SimulatedEngine, body: Generation, prompt: Prompt, name: str, **more: Any) -> Request:
    """Return a request inside the engine. Clients may reuse a ``name``; ids inside the engine are unique.

    Raises :class:`RequestError` (400) for a form of the answer that has no text or is not simulated.
    """
    called, sglang = function_called(engine, body), engine.settings.engine == "sglang"
    try:
        if called is not None:
            schema = called.get("parameters") or {}
            text = formed_text({"type": "json_schema", "json_schema": {"schema": schema}}, None)
        elif sglang:
            own = {"regex": body.regex, "ebnf": body.ebnf}
            own |= {} if hasattr(body, "messages") else {"json_schema": body.json_schema}
            text = formed_text(body.response_format, None, own)
        else:
            text = formed_text(body.response_format, body.structured_outputs)
        given = None if text is None else engine.answers.fixed(text)
    except FormError as error:
        field = "tools" if called is not None else error.field or "response_format"
        raise RequestError(str(error), param=field) from error
    sample = engine.answers.sampler(prompt.ids, prompt.media, min_tokens=body.min_tokens, ends=not body.ignore_eos)
    ends = not body.ignore_eos
    if given is not None:
        sample, ends = given, True
    return Request(
        id=f"{name}-{uuid.uuid4().hex[:8]}",
        sample=sample,
        media=prompt.media,
        salt=body.cache_salt,
        stop_ids=frozenset((*(body.stop_token_ids or ()), *(engine.model.stop_ids if ends else ()))),
        **more,
    )
