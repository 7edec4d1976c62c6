"""`mmrouter bench` against servers that answer well, badly and not at all, over real sockets."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from rich.console import Console

from mmrouter_cli.benching import asking, workload
from mmrouter_cli.benching.live import Screen
from mmrouter_cli.benching.run import Asked, run
from mmrouter_cli.benching.values import Answer, BenchError, Load, Result

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """A server for chats and models; yields its URL."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield str(site.name)
    finally:
        await runner.cleanup()


def event(**values: object) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def said(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


def usage(prompt: int, completion: int, cached: int | None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    counted = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event(choices=[], usage=counted)


DONE = b"data: [DONE]\n\n"
GOOD = (said(""), said("a"), b": a comment\n\n", said("b"), said("c", "stop"), usage(40, 3, 16), DONE)


async def streamed(request: web.Request, *pieces: bytes, pause: float = 0.0) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await reply.prepare(request)
    for piece in pieces:
        await reply.write(piece)
        await asyncio.sleep(pause)
    return reply


async def asked(handler: Handler, timeout: float = 5.0) -> tuple[Answer, list[float]]:
    gaps: list[float] = []
    async with serving(handler) as url, asking.session(timeout, 4) as client:
        answer = await asking.ask(client, url, {}, b"{}", started=0.0, late=0.0, gap=gaps.append)
    return answer, gaps


async def test_a_whole_answer_has_its_times_and_what_it_cost() -> None:
    answer, gaps = await asked(lambda request: streamed(request, *GOOD, pause=0.02))
    assert (answer.error, answer.tokens_seen, answer.prompt, answer.completion, answer.cached) == ("", 3, 40, 3, 16)
    # What is read late is never early: one pause before the first text, four before the last, six before the end.
    assert (answer.first >= 0.02, answer.last >= 0.08, answer.total >= 0.12) == (True, True, True)
    assert len(gaps) == 2
    assert answer.last == pytest.approx(answer.first + sum(gaps))
    assert answer.last < answer.total


async def cut_off(request: web.Request) -> web.StreamResponse:
    reply = await streamed(request, said("a"))
    assert request.transport is not None
    request.transport.close()
    return reply


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def full(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no room"}}, status=503)


async def unasked(request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": []})


BROKEN = event(error={"message": "cannot schedule new futures after shutdown", "code": 500})


@pytest.mark.parametrize(
    ("handler", "kind", "message"),
    [
        (full, "status 503", "no room"),
        (unasked, "no stream", "application/json"),
        (hang, "timeout", "0.3 s"),
        (cut_off, "broken off", ""),
        (lambda request: streamed(request, said("a")), "broken off", "ended before the answer"),
        (lambda request: streamed(request, said("a"), BROKEN, DONE), "error event", "cannot schedule"),
        (lambda request: streamed(request, b"data: {no\n\n"), "unreadable", ""),
        (lambda request: streamed(request, b"data: " + b"x" * 2**20), "unreadable", ""),
    ],
)
async def test_whatever_goes_wrong_is_an_error_of_its_own_kind(handler: Handler, kind: str, message: str) -> None:
    answer, _ = await asked(handler, timeout=0.3 if kind == "timeout" else 5.0)
    assert answer.error == kind, answer.message
    assert message in answer.message


async def test_nobody_there_is_an_error_and_no_run() -> None:
    async with serving(full) as gone, asking.session(5, 1) as client:
        pass
    async with asking.session(5, 1) as client:
        answer = await asking.ask(client, gone, {}, b"{}", started=0.0, late=0.0, gap=list[float]().append)
    assert answer.error == "connect"
    with pytest.raises(BenchError, match="does not answer"):
        await whole(gone, Load(concurrency=1))
    async with serving(full) as url:
        with pytest.raises(BenchError, match=r"answered 503: .*no room"):
            await whole(url, Load(concurrency=1))


async def whole(url: str, load: Load, **options: str) -> Result:
    plan, left_out = workload.planned(workload.synthetic(load), load)
    screen = Screen(Console(file=io.StringIO()))
    return await run(Asked(url, "salt", 10.0, **options), load, plan, left_out, screen)


class Engine:
    """Answers as an engine with a tokenizer of three tokens per word, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.most = self.under_way = 0
        self.connections: set[object] = set()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        texts = [m["content"] if isinstance(m["content"], str) else m["content"][-1]["text"] for m in body["messages"]]
        prompt = 10 + 3 * sum(len(text.split()) for text in texts)
        if not body.get("stream"):
            return web.json_response({"usage": {"prompt_tokens": prompt}})
        self.asked.append(prompt)
        assert request.transport is not None
        self.connections.add(request.transport.get_extra_info("peername"))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            return await streamed(
                request, said("a"), said("b", "length"), usage(prompt, 2, prompt // 2), DONE, pause=0.01
            )
        finally:
            self.under_way -= 1


async def test_any_endpoint_is_measured_with_prompts_as_long_as_its_tokenizer_makes_them() -> None:
    engine = Engine()
    load = Load(requests=12, concurrency=3, turns=2, image_share=0.0, system_tokens=300, text_tokens=90)
    async with serving(engine) as url:
        result = await whole(url, load)
    assert (result.answered, result.failed, result.unanswered, result.interrupted) == (12, 0, 0, False)
    assert (result.model, result.routing, result.tokens_per_word) == ("m", None, 3.0)
    assert result.hit_ratio == pytest.approx(0.5, abs=0.01)
    assert 1 < engine.most <= 3
    assert len(engine.connections) <= 6  # they are used again
    assert min(engine.asked) > 300
    assert result.prompt_tokens == sum(engine.asked)
    assert [(row.prompt, row.cached) for row in result.rows] == [
        (row.prompt, (row.prompt or 0) // 2) for row in result.rows
    ]


async def test_by_the_clock_requests_go_out_when_they_are_due_whatever_answers_take() -> None:
    engine = Engine()
    load = Load(requests=20, rate=100.0, turns=1, image_share=0.0, system_tokens=10)
    async with serving(engine) as url:
        result = await whole(url, load)
    due = [conversation.at for conversation in workload.planned(workload.synthetic(load), load)[0]]
    sent = sorted(row.started for row in result.rows)
    assert all(at <= started for at, started in zip(due, sent, strict=True))
    assert result.answered == 20


async def test_a_policy_is_refused_where_it_would_be_ignored() -> None:
    async with serving(Engine()) as url:
        with pytest.raises(BenchError, match="no mmrouter"):
            await whole(url, Load(concurrency=1), policy="roundRobin")
