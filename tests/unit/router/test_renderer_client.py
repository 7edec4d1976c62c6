"""The renderers' client: one rendering per content, a bounded cache, and a cause for every failure."""

import asyncio
import json

import pytest
from unit.router.rig import LoopbackEngine, cancelled, http_answer, refused
from waiting import until

from mmrouter_lib.block_keys import Span
from mmrouter_lib.media_identity import to_wire
from mmrouter_router.fleet.workers import Member
from mmrouter_router.http.engine_requests import EngineRequestError
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.renderer_client import Renderer
from mmrouter_router.telemetry.metrics import Metrics

A, B = b"a" * 32, b"b" * 32


class Server(LoopbackEngine):
    """A renderer on a loopback address: every image is four tokens, every message one.

    ``hold``: it answers once ``held`` is set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.status = 200
        self.raw: bytes | None = None
        self.held = asyncio.Event()
        self.held.set()
        self.hold = self.held.clear

    async def respond(self, reader, writer, headers) -> bool:
        body = self.raw or self._render(self.requests[-1][2])
        await self.held.wait()
        writer.write(http_answer(self.status, body))
        return True

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
        return sum("Are you there" not in json.dumps(body) for _, _, body in self.requests)


class Rig:
    def __init__(self, **options) -> None:
        self.upstream = Upstream(connect_seconds=10)
        self.metrics = Metrics()
        self.renderer = Renderer(self.upstream, "secret", "m", self.metrics, **options)
        self.running: asyncio.Task | None = None

    async def with_servers(self, *servers: Server) -> None:
        for server in servers:
            await server.serve()
        self.renderer.roster(Member(s.ip, s.ip, s.ip, "render", "renderer") for s in servers)
        self.running = asyncio.create_task(self.renderer.run())
        await until(lambda: len(self.renderer.usable) == len(servers))

    def counted(self, source: str) -> float:
        return self.metrics.registry.get_sample_value("mmrouter_rendered_total", {"source": source}) or 0


@pytest.fixture
async def rig(request):
    """A client, whose cache is bounded by the test's parameter."""
    rig = Rig(**getattr(request, "param", {}))
    yield rig
    if rig.running is not None:
        rig.running.cancel()
    rig.upstream.close()


@pytest.fixture
async def server(rig):
    """The only renderer, which is usable."""
    await rig.with_servers(made := Server())
    return made


def chat(*identities: bytes, url: str = "data:image/png;base64,AA", text: str = "look", **fields):
    parts = [{"type": "image_url", "image_url": {"url": url}, "uuid": to_wire(identity)} for identity in identities]
    return {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}], **fields}


async def test_rendering_has_ids_spans_and_our_identities_without_tensors(rig, server):
    ids, spans = await rig.renderer.render(chat(A, B))
    assert ids.tolist() == [1, *[9] * 8]
    assert spans == (Span(1, 4, A), Span(5, 4, B))
    assert server.requests[-1][2]["mm_payload"] == "none"


async def test_same_content_is_rendered_once(rig, server):
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


@pytest.mark.parametrize("rig", [{"tokens": 12}], indirect=True)
async def test_cache_is_bounded_by_tokens(rig, server):
    for identity in (A, B, A):  # 5 tokens each: two fit
        await rig.renderer.render(chat(identity))
    assert server.asked == 2
    await rig.renderer.render(chat(A, B))  # 9 tokens: evicts both
    await rig.renderer.render(chat(A))
    assert server.asked == 4


async def test_tenants_share_no_answer(rig, server):
    for tenant in ("red", "blue", "red"):
        await rig.renderer.render(chat(A), tenant)
    assert server.asked == 2


async def test_concurrent_requests_for_one_content_share_a_rendering(rig, server):
    answers = await asyncio.gather(*(rig.renderer.render(chat(A)) for _ in range(8)), rig.renderer.render(chat(B)))
    assert [spans[0].identity for _, spans in answers] == [A] * 8 + [B]
    assert (server.asked, rig.counted("renderer"), rig.counted("joined")) == (2, 2, 7)


async def test_cancelled_caller_leaves_the_rendering_and_the_last_one_cancels_it(rig, server):
    server.hold()
    askers = [asyncio.create_task(rig.renderer.render(chat(A))) for _ in range(3)]
    await until(lambda: server.asked == 1)
    askers[0].cancel()
    assert isinstance((await asyncio.gather(askers[0], return_exceptions=True))[0], asyncio.CancelledError)
    server.held.set()
    assert (await askers[1])[1] == (await askers[2])[1] == (Span(1, 4, A),)
    assert server.asked == 1
    server.hold()
    alone = asyncio.create_task(rig.renderer.render(chat(B)))
    await until(lambda: server.asked == 2)
    await cancelled(alone)
    after = asyncio.create_task(rig.renderer.render(chat(B)))  # must not join the cancelled one
    await until(lambda: server.asked == 3)
    server.held.set()
    assert (await after)[1] == (Span(1, 4, B),)


async def test_failure_goes_to_all_callers_and_is_not_cached(rig, server):
    server.raw = b"{}"
    results = await asyncio.gather(*(rig.renderer.render(chat(A)) for _ in range(3)), return_exceptions=True)
    assert [error.cause for error in results] == ["unusable"] * 3
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
    unavailable = await refused(rig.renderer.render(chat(A)), EngineRequestError)
    assert (unavailable.cause, rig.counted("unavailable")) == ("unavailable", 1)
    assert "no renderer is ready" in str(unavailable)
    await rig.with_servers(server := Server())
    server.status, server.raw = 400, b'{"error": {"message": "bad template"}}'
    error = await refused(rig.renderer.render(chat(A)), EngineRequestError)
    assert ("bad template" in str(error), error.cause, rig.counted("refused")) == (True, "refused", 1)
    server.status, server.raw = 200, b"{}"
    error = await refused(rig.renderer.render(chat(A)), EngineRequestError)
    assert ("not a rendered prompt" in str(error), error.cause, rig.counted("unusable")) == (True, "unusable", 1)


async def test_lost_renderer_is_unusable_until_it_answers(rig, server):
    server.server.close()
    await server.server.wait_closed()
    rig.upstream.close()
    assert (await refused(rig.renderer.render(chat(A)), EngineRequestError)).cause == "lost"
    assert rig.renderer.usable == []
    assert rig.renderer.state()[0]["verified"] is False


@pytest.mark.parametrize(
    ("raw", "message"), [(None, ""), (b'{"token_ids": [1, 2]}', "one image became 0 in the prompt")]
)
async def test_renderer_is_verified_only_after_rendering_the_probe_image(rig, raw, message):
    server = Server()
    server.raw = raw
    await rig.with_servers(server)
    await until(lambda: rig.renderer.state()[0]["message" if message else "verified"])
    state = rig.renderer.state()[0]
    assert (state["answered"], state["verified"], state["message"]) == (True, not message, message)
