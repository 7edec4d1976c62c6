"""Servers that answer chats as engines do, over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

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
                request, said("a"), said("b", "length"), usage(prompt, 2, prompt // 2), DONE, pause=0.01
            )
        finally:
            self.under_way -= 1
