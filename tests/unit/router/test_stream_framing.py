"""Streams of engines reach the client event by event, however their body is delimited."""

import asyncio

import httpx
import pytest
from unit.router.rig import LoopbackEngine, LoopbackServer
from unit.router.router_rig import HELLO, join, member, router
from unit.router.test_continued_stream import chunk
from unit.router.test_upstream import ask, engine, upstream  # noqa: F401  (fixtures)
from waiting import until

from mmrouter_router.http.engine_connection import UpstreamError
from mmrouter_router.request.prepared import CHAT

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
FIRST = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[7]}]}\n\n'
LAST = b"data: [DONE]\n\n"
SHOWN = FIRST.replace(b',"token_ids":[7]', b"")


class Framed(LoopbackEngine):
    """Sends the second event when the test says so."""

    def __init__(self, framing: str) -> None:
        super().__init__()
        self.framing, self.go = framing, asyncio.Event()

    async def respond(self, reader, writer, headers) -> bool:
        length = {"length": b"content-length: %d\r\n" % len(FIRST + LAST), "close": b""}
        chunked = self.framing == "chunked"
        writer.write(HEAD + length.get(self.framing, b"transfer-encoding: chunked\r\n") + b"\r\n")
        writer.write(chunk(FIRST) if chunked else FIRST)
        await self.go.wait()
        writer.write(chunk(LAST) + b"0\r\n\r\n" if chunked else LAST)
        if self.framing == "close":
            writer.close()
        return self.framing != "close"


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}], ids=["ids are removed", "passed on as it is"])
async def test_the_client_gets_an_event_before_the_engine_has_sent_the_next_one(framing, sampling):
    serving = Framed(framing)
    await serving.serve()
    async with router() as r, LoopbackServer(r.client_app()) as server:
        join(r, member("a", ip=serving.ip))
        body = {**HELLO, "stream": True, **sampling}
        url = f"http://{server.ip}:8000{CHAT}"
        async with httpx.AsyncClient(timeout=60) as client, client.stream("POST", url, json=body) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == (FIRST if sampling else SHOWN)
            serving.go.set()
            assert b"".join([piece async for piece in pieces]) == LAST
    serving.close()


async def test_a_body_that_the_router_itself_cut_is_not_complete(engine, upstream):  # noqa: F811
    engine.says(HEAD + b"\r\n" + FIRST)
    answer = await ask(upstream, engine)
    assert await answer.piece() == FIRST
    answer.connection.close()
    await until(lambda: answer.connection.on_lost is None)
    with pytest.raises(UpstreamError):
        await answer.piece()
    answer.close()
