"""The renderers' client: one rendering per content, a bounded cache, and a cause for every failure."""

import asyncio
import contextlib
import itertools
import json
import os

import pytest

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.media_identity import to_wire
from mmrouter_router.fleet.workers import Member
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.renderer_client import Renderer, RendererError
from mmrouter_router.telemetry.metrics import Metrics

_hosts = itertools.count(1)
A, B = b"a" * 32, b"b" * 32


class Server:
    """A renderer on a loopback address: every image is four tokens, every message one."""

    def __init__(self) -> None:
        self.ip = f"127.79.{os.getpid() % 250}.{next(_hosts)}"
        self.status, self.seen = 200, []
        self.raw: bytes | None = None
        self.held = asyncio.Event()
        self.held.set()

    def hold(self) -> None:
        """Delay answers until ``held`` is set."""
        self.held.clear()

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._connection, self.ip, HTTP_PORT)

    async def _connection(self, reader, writer) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"content-length" in line)
                self.seen.append(json.loads(await reader.readexactly(length)))
                body = self.raw or self._render(self.seen[-1])
                await self.held.wait()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (self.status, len(body), body))
                await writer.drain()

    def _render(self, body) -> bytes:
        ids, names, places = [], [], []
        for message in body["messages"]:
            ids.append(1)
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] == "image_url":
                    names.append(part["uuid"])
                    places.append({"offset": len(ids), "length": 4})
                    ids += [9] * 4
        features = {"mm_hashes": {"image": names}, "mm_placeholders": {"image": places}}
        return json.dumps({"token_ids": ids, "features": features if names else None}).encode()

    @property
    def asked(self) -> int:
        return sum("Are you there" not in json.dumps(body) for body in self.seen)


class Rig:
    def __init__(self, **options) -> None:
        self.upstream = Upstream(connect_seconds=10)
        self.metrics = Metrics()
        self.renderer = Renderer(self.upstream, "secret", "m", self.metrics, **options)
        self.running: asyncio.Task | None = None

    async def with_servers(self, *servers: Server) -> None:
        for server in servers:
            await server.start()
        self.renderer.roster(Member(s.ip, s.ip, s.ip, "render", "renderer") for s in servers)
        self.running = asyncio.create_task(self.renderer.run())
        await self.until(lambda: len(self.renderer.usable) == len(servers))

    async def until(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)

    def counted(self, source: str) -> float:
        return self.metrics.registry.get_sample_value("mmrouter_rendered_total", {"source": source}) or 0


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    if rig.running is not None:
        rig.running.cancel()
    rig.upstream.close()


def chat(*identities: bytes, url: str = "data:image/png;base64,AA", text: str = "look", **fields):
    parts = [{"type": "image_url", "image_url": {"url": url}, "uuid": to_wire(identity)} for identity in identities]
    return {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}], **fields}


async def test_rendering_has_ids_spans_and_our_identities_without_tensors(rig):
    await rig.with_servers(server := Server())
    ids, spans = await rig.renderer.render(chat(A, B))
    assert ids.tolist() == [1, *[9] * 8]
    assert spans == (Span(1, 4, A), Span(5, 4, B))
    assert server.seen[-1]["mm_payload"] == "none"


async def test_same_content_is_rendered_once(rig):
    await rig.with_servers(server := Server())
    first = await rig.renderer.render(chat(A))
    assert await rig.renderer.render(chat(A, url="data:image/png;base64,BB", stream=True, cache_salt="t")) == first
    assert (server.asked, rig.counted("cache"), rig.counted("renderer")) == (1, 1, 1)
    for other in (chat(B), chat(A, text="another"), chat(A, tools=[{"type": "function"}])):
        await rig.renderer.render(other)
    assert server.asked == 4


async def test_unadmitted_renderer_is_used_only_without_alternative(rig):
    await rig.with_servers(old := Server(), new := Server())
    members = {s.ip: Member(s.ip, s.ip, s.ip, "render", "renderer", admitted=s is old) for s in (old, new)}
    rig.renderer.roster(members.values())
    for text in "abcd":
        await rig.renderer.render(chat(text=text))
    assert (old.asked, new.asked) == (4, 0)
    rig.renderer.roster([members[new.ip]])
    await rig.renderer.render(chat(text="e"))
    assert (old.asked, new.asked) == (4, 1)


async def test_cache_is_bounded_by_tokens():
    rig = Rig(tokens=12)
    await rig.with_servers(server := Server())
    for identity in (A, B, A):  # 5 tokens each: two fit
        await rig.renderer.render(chat(identity))
    assert server.asked == 2
    await rig.renderer.render(chat(A, B))  # 9 tokens: evicts both
    await rig.renderer.render(chat(A))
    assert server.asked == 4
    rig.running.cancel()
    rig.upstream.close()


async def test_concurrent_requests_for_one_content_share_a_rendering():
    rig = Rig(tokens=12)
    await rig.with_servers(server := Server())
    answers = await asyncio.gather(*(rig.renderer.render(chat(A)) for _ in range(8)), rig.renderer.render(chat(B)))
    assert [spans[0].identity for _, spans in answers] == [A] * 8 + [B]
    assert (server.asked, rig.counted("renderer"), rig.counted("joined")) == (2, 2, 7)
    for identity in (B, A, B):  # 5 tokens each: two fit
        await rig.renderer.render(chat(identity))
    assert (server.asked, rig.counted("cache")) == (2, 3)
    rig.running.cancel()
    rig.upstream.close()


async def test_cancelled_caller_leaves_the_rendering_and_the_last_one_cancels_it(rig):
    await rig.with_servers(server := Server())
    server.hold()
    askers = [asyncio.create_task(rig.renderer.render(chat(A))) for _ in range(3)]
    await rig.until(lambda: server.asked == 1)
    askers[0].cancel()
    assert isinstance((await asyncio.gather(askers[0], return_exceptions=True))[0], asyncio.CancelledError)
    server.held.set()
    assert (await askers[1])[1] == (await askers[2])[1] == (Span(1, 4, A),)
    assert server.asked == 1
    server.hold()
    alone = asyncio.create_task(rig.renderer.render(chat(B)))
    await rig.until(lambda: server.asked == 2)
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    after = asyncio.create_task(rig.renderer.render(chat(B)))  # must not join the cancelled one
    await rig.until(lambda: server.asked == 3)
    server.held.set()
    assert (await after)[1] == (Span(1, 4, B),)


async def test_failure_goes_to_all_callers_and_is_not_cached(rig):
    await rig.with_servers(server := Server())
    server.raw = b"{}"
    said = await asyncio.gather(*(rig.renderer.render(chat(A)) for _ in range(3)), return_exceptions=True)
    assert [error.cause for error in said] == ["unusable"] * 3
    assert (server.asked, rig.counted("unusable")) == (1, 3)
    server.raw = None
    assert (await rig.renderer.render(chat(A)))[1] == (Span(1, 4, A),)


async def test_renderers_take_turns_and_removed_ones_are_skipped(rig):
    first, second = Server(), Server()
    await rig.with_servers(first, second)
    for number in range(4):
        await rig.renderer.render(chat(text=str(number)))
    assert (first.asked, second.asked) == (2, 2)
    rig.renderer.roster([Member(first.ip, first.ip, first.ip, "render", "renderer")])
    await rig.renderer.render(chat(text="after"))
    assert (first.asked, second.asked) == (3, 2)


async def test_every_failure_has_a_counted_cause(rig):
    with pytest.raises(RendererError, match="no renderer is ready") as unavailable:
        await rig.renderer.render(chat(A))
    assert (unavailable.value.cause, rig.counted("nobody")) == ("nobody", 1)
    await rig.with_servers(server := Server())
    server.status, server.raw = 400, b'{"error": {"message": "bad template"}}'
    with pytest.raises(RendererError, match="bad template") as refused:
        await rig.renderer.render(chat(A))
    server.status, server.raw = 200, b"{}"
    with pytest.raises(RendererError, match="not a rendered prompt") as unusable:
        await rig.renderer.render(chat(A))
    assert (refused.value.cause, unusable.value.cause) == ("refused", "unusable")
    assert (rig.counted("refused"), rig.counted("unusable")) == (1, 1)
    server.raw = None
    await rig.renderer.render(chat(A))  # failures are not cached


async def test_lost_renderer_is_unusable_until_it_answers(rig):
    await rig.with_servers(server := Server())
    server.server.close()
    await server.server.wait_closed()
    rig.upstream.close()
    with pytest.raises(RendererError) as lost:
        await rig.renderer.render(chat(A))
    assert lost.value.cause == "lost"
    assert rig.renderer.usable == []
    assert rig.renderer.state()[0]["verified"] is False


async def test_renderer_is_verified_after_rendering_the_probe_image(rig):
    server = Server()
    await rig.with_servers(server)
    await rig.until(lambda: rig.renderer.state()[0]["verified"])
    state = rig.renderer.state()[0]
    assert (state["answered"], state["message"]) == (True, "")


async def test_renderer_that_loses_the_probe_image_is_unverified(rig):
    server = Server()
    server.raw = b'{"token_ids": [1, 2]}'
    await rig.with_servers(server)
    await rig.until(lambda: rig.renderer.state()[0]["message"])
    state = rig.renderer.state()[0]
    assert (state["answered"], state["verified"]) == (True, False)
    assert state["message"] == "one image became 0 in the prompt"
