"""`mmrouter bench` against servers that answer well, badly and not at all, over real sockets, and as it is typed."""

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from rich.console import Console

from mmrouter_cli.bench import chat_stream, terminal, workload
from mmrouter_cli.bench.endpoint_probe import Target
from mmrouter_cli.bench.http_client import Client
from mmrouter_cli.bench.run import run
from mmrouter_cli.bench.types import Answer, BenchError, LoadSpec, Result

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


def chunk(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


def usage(prompt: int, completion: int, cached: int | None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    counted = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event(choices=[], usage=counted)


DONE = b"data: [DONE]\n\n"
GOOD = (chunk(""), chunk("a"), b": a comment\n\n", chunk("b"), chunk("c", "stop"), usage(40, 3, 16), DONE)


async def streamed(request: web.Request, *pieces: bytes, pause: float = 0.0) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await reply.prepare(request)
    for piece in pieces:
        await reply.write(piece)
        await asyncio.sleep(pause)
    return reply


class Engine:
    """Answers as an engine with a tokenizer of three tokens per word, and records its requests."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.keys: list[str] = []
        self.most = self.under_way = 0
        self.connections: set[object] = set()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        texts = [m["content"] if isinstance(m["content"], str) else m["content"][-1]["text"] for m in body["messages"]]
        prompt = 10 + 3 * sum(len(text.split()) for text in texts)
        if not body.get("stream"):
            return web.json_response({"usage": {"prompt_tokens": prompt}})
        self.asked.append(prompt)
        self.keys.append(request.headers.get("authorization", ""))
        assert request.transport is not None
        self.connections.add(request.transport.get_extra_info("peername"))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            return await streamed(
                request, chunk("a"), chunk("b", "length"), usage(prompt, 2, prompt // 2), DONE, pause=0.01
            )
        finally:
            self.under_way -= 1


async def asked(handler: Handler, timeout: float = 5.0) -> tuple[Answer, list[float]]:
    gaps: list[float] = []
    async with serving(handler) as url:
        answer = await chat_stream.ask(Client(url, timeout), {}, b"{}", started=0.0, late=0.0, gap=gaps.append)
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
    reply = await streamed(request, chunk("a"))
    assert request.transport is not None
    request.transport.close()
    return reply


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")


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
        (lambda request: streamed(request, chunk("a"), chunk("b")), "broken off", "ended before the answer"),
        (lambda request: streamed(request, chunk("a"), chunk("b"), BROKEN, DONE), "error event", "cannot schedule"),
        (lambda request: streamed(request, b"data: {no\n\n"), "unreadable", ""),
        (lambda request: streamed(request, b"data: " + b"x" * 2**20), "unreadable", ""),
    ],
)
async def test_every_failure_has_a_kind_of_its_own(handler: Handler, kind: str, message: str) -> None:
    answer, gaps = await asked(handler, timeout=0.3 if kind == "timeout" else 5.0)
    assert answer.error == kind, answer.message
    assert message in answer.message
    assert gaps == []  # an answer that failed is no fast one


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"error": {"message": "no room", "code": 503}}', "no room"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b'{"error": {"message": ""}}', '{"error": {"message": ""}}'),
        (b"<h1>Bad Gateway</h1>", "<h1>Bad Gateway</h1>"),
        (b"\xff", "\ufffd"),
    ],
)
def test_an_error_is_shown_by_its_message_or_else_in_full(raw: bytes, message: str) -> None:
    assert chat_stream.error_message(raw) == message


async def test_an_endpoint_without_a_listener_is_an_error_and_no_run() -> None:
    async with serving(full) as gone:
        pass
    answer = await chat_stream.ask(Client(gone, 5), {}, b"{}", started=0.0, late=0.0, gap=list[float]().append)
    assert (answer.error, answer.message) == ("connect", "Connection refused")
    with pytest.raises(BenchError, match="does not answer: Connection refused"):
        await whole(gone, LoadSpec(concurrency=1))
    async with serving(full) as url:
        with pytest.raises(BenchError, match=r"answered 503: .*no room"):
            await whole(url, LoadSpec(concurrency=1))


async def whole(url: str, load: LoadSpec, **options: str) -> Result:
    plan, left_out = workload.select(workload.synthetic(load), load)
    return await run(Target(url, "salt", 10.0, **options), load, plan, left_out, Console(file=io.StringIO()))


async def test_any_endpoint_is_measured_with_prompts_as_long_as_its_tokenizer_makes_them() -> None:
    engine = Engine()
    load = LoadSpec(requests=12, concurrency=3, turns=2, image_share=0.0, system_tokens=300, text_tokens=90)
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
    load = LoadSpec(requests=20, rate=100.0, turns=1, image_share=0.0, system_tokens=10)
    async with serving(engine) as url:
        result = await whole(url, load)
    due = [conversation.at for conversation in workload.select(workload.synthetic(load), load)[0]]
    sent = sorted(row.started for row in result.rows)
    assert all(at <= started for at, started in zip(due, sent, strict=True))
    assert result.answered == 20


async def test_a_policy_is_refused_where_it_would_be_ignored() -> None:
    async with serving(Engine()) as url:
        with pytest.raises(BenchError, match="no mmrouter"):
            await whole(url, LoadSpec(concurrency=1), policy="roundRobin")


@pytest.mark.parametrize(
    ("key", "message"), [({}, "it wants a key: --api-key"), ({"api_key": "k"}, "it wants another key")]
)
async def test_a_rejected_key_is_reported_with_the_option_to_give(key: dict[str, str], message: str) -> None:
    async def unauthorized(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "Unauthorized"}, status=401)

    async with serving(unauthorized) as url:
        with pytest.raises(BenchError, match=f"answered 401: Unauthorized .{message}"):
            await whole(url, LoadSpec(concurrency=1), **key)


async def test_a_run_that_is_stopped_before_its_first_request_is_due_can_be_shown() -> None:
    load = LoadSpec(requests=2, rate=0.001, turns=1, image_share=0.0, system_tokens=10)
    ends = signal.getsignal(signal.SIGINT)
    async with serving(Engine()) as url:
        running = asyncio.create_task(whole(url, load))
        async with asyncio.timeout(20):
            while signal.getsignal(signal.SIGINT) is ends:
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        result = await running
    assert (result.interrupted, result.sent, result.answered) == (True, 0, 0)
    assert result.seconds > 0, "rates are per second"
    assert terminal.facts(result)[1].startswith(f"0 answered and 0 failed in {result.seconds:.1f} s: 0.00 requests/s")


SMALL = ("--requests", "6", "--concurrency", "2", "--image-share", "0", "--system-tokens", "60")
NO_LISTENER = "http://127.0.0.1:1"


async def bench(*arguments: str) -> tuple[int | None, str, str]:
    """Return exit status, stdout and stderr."""
    env = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    pipe = asyncio.subprocess.PIPE
    argv = ("-m", "mmrouter_cli", "bench", *arguments)
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=pipe, stderr=pipe, env=env)
    out, shown = await process.communicate()
    return process.returncode, out.decode(), shown.decode()


async def test_what_cannot_be_compared_is_said_before_anything_is_sent_and_a_first_run_is_kept(tmp_path: Path) -> None:
    engine, file, both = Engine(), tmp_path / "run.json", tmp_path / "both.json"
    async with serving(engine) as url:
        status, out, shown = await bench(url, "--against", NO_LISTENER, *SMALL, "--json", str(file))
        assert (status, shown.splitlines()[-1]) == (2, f"mmrouter: {NO_LISTENER} does not answer: Connection refused")
        assert "6 answered and 0 failed" in out
        kept = msgspec.json.decode(file.read_bytes(), type=Result)
        assert (kept.answered, len(engine.asked)) == (6, 6)
        both.write_bytes(msgspec.json.encode([kept, kept]))
        for other, message in ((str(tmp_path / "none"), "neither a URL nor a file"), (str(both), "these are 3")):
            status, _, shown = await bench(url, "--against", other, *SMALL)
            assert (status, message in shown) == (2, True), shown
    assert len(engine.asked) == 6


async def test_a_file_with_runs_by_encoder_modes_is_shown_again_side_by_side(tmp_path: Path) -> None:
    file, page = tmp_path / "modes.json", tmp_path / "modes.html"
    async with serving(Engine()) as url:
        run = await whole(url, LoadSpec(requests=2, concurrency=1))
    for modes in (("auto", "perImage"), ("auto", "perImage", "perRequest")):
        file.write_bytes(msgspec.json.encode([msgspec.structs.replace(run, encoder_mode=mode) for mode in modes]))
        status, out, shown = await bench(str(file), "--html", str(page))
        assert (status, shown) == (0, "")
        assert "encoder modes" in out
        assert "second against first" not in out
        assert all(mode in out and mode in page.read_text() for mode in modes)


async def test_without_an_answer_to_the_first_run_there_is_no_second_one() -> None:
    class Full(Engine):
        async def __call__(self, request: web.Request) -> web.StreamResponse:
            if (await request.json()).get("stream"):
                self.asked.append(0)
                return web.json_response({"error": {"message": "no room"}}, status=503)
            return await super().__call__(request)

    engine = Full()
    async with serving(engine) as url:
        status, out, shown = await bench(url, "--against", url, *SMALL)
    assert (status, len(engine.asked)) == (1, 6)
    assert "6 failed: status 503: no room" in out
    assert shown.splitlines()[-1] == "mmrouter: not compared: there is no second run"


@pytest.mark.parametrize(
    ("options", "second", "refused"),
    [(("--against-api-key", "two"), "two", ""), (("--salt", "s"), "one", "not compared: both sent the same words")],
)
async def test_each_endpoint_gets_its_key_and_the_same_words_twice_are_no_comparison(
    options: tuple[str, ...], second: str, refused: str
) -> None:
    engine = Engine()
    async with serving(engine) as url:
        status, out, shown = await bench(url, "--against", url, *SMALL, "--api-key", "one", *options)
    assert engine.keys == ["Bearer one"] * 6 + [f"Bearer {second}"] * 6, shown
    assert (status, "second against first" in out) == ((1, False) if refused else (0, True))
    assert refused in shown
