"""Sampled requests shown to a renderer: the simulator's, behind the real client; bounded, and never a false alarm."""

import asyncio
import functools
import itertools
import os
from array import array
from dataclasses import replace

import pytest
import uvicorn
from unit.router.rig import value
from unit.router.test_prepare import MODEL, image, prepare, text  # noqa: F401  (a fixture)

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.base.request_rewriting import ImageRewrite
from mmrouter_lib.engines.vllm.request import rewrite_chat
from mmrouter_lib.media_identity import to_wire
from mmrouter_router.explain.decisions import DecisionTrace
from mmrouter_router.fleet.workers import Member
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.engine_request import encode_body
from mmrouter_router.request.renderer_client import Renderer
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.verify.sampling import RenderSampler
from mmrouter_sim import model
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.vllm.app import build
from mmrouter_sim.vllm.flags import parse

_hosts = itertools.count(1)


@functools.cache
def simulated():
    """The simulator as a renderer; it keeps no request."""
    settings = parse(["launch", "render", str(MODEL), "--served-model-name", "t"])
    return build(SimulatedEngine(settings, model.load("t", MODEL, chat_template=None, processor={})))


class Rig:
    def __init__(self) -> None:
        self.metrics, self.upstream = Metrics(), Upstream(connect_seconds=10)
        self.metrics.parity.describe("vllm", "qwen2_vl")
        self.renderer = Renderer(self.upstream, "k", "t", self.metrics)
        self.tasks: list[asyncio.Task] = []
        self.sockets: list[asyncio.Server] = []

    async def with_renderer(self) -> None:
        ip = f"127.78.{os.getpid() % 250}.{next(_hosts)}"
        # Only what serves: uvicorn's own loop looks at its signals every 0.1 s, which is how long it takes to end.
        config = uvicorn.Config(simulated(), host=ip, port=HTTP_PORT, lifespan="off", log_config=None)
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        self.sockets += server.servers
        self.renderer.roster([Member("render", "render", ip, "render", "renderer")])
        self.tasks.append(asyncio.create_task(self.renderer.run()))
        await self.until(lambda: self.renderer.usable)

    async def until(self, condition) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)

    def sampler(self, **options) -> RenderSampler:
        return RenderSampler(lambda request_id: "unsampled" not in request_id, self.renderer, self.metrics, **options)

    async def asked(self, prepared, request_id="r-1"):
        """The outcome of one request."""
        sampler, trace = self.sampler(), kept(request_id)
        sampler.offer(trace, prepared, lambda: sent(prepared))
        running = asyncio.create_task(sampler.run())
        self.tasks.append(running)
        await self.until(lambda: trace.rendering is not None)
        return trace.rendering

    def counted(self, result: str, cause: str = "") -> float:
        labels = {"engine": "vllm", "family": "qwen2_vl", "result": result, "cause": cause}
        return self.metrics.registry.get_sample_value("mmrouter_parity_total", labels) or 0


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    for task in rig.tasks:
        task.cancel()
    rig.upstream.close()
    for serving in rig.sockets:
        serving.close()
        await serving.wait_closed()


def kept(request_id: str) -> DecisionTrace:
    return DecisionTrace(request_id, None, 0, array("Q"), [])


def sent(prepared) -> bytes:
    images = [ImageRewrite(i.message, i.part, i.media.data_uri(), to_wire(i.identity)) for i in prepared.images]
    return encode_body(rewrite_chat(prepared.request.body, images, model="t", cache_salt="tenant").body)


async def test_prediction_of_a_known_family_matches_the_renderer(rig, prepare):  # noqa: F811
    await rig.with_renderer()
    found = await rig.asked(await prepare(text("look "), image("a"), text(" and "), image("b", 56), stream=True))
    assert (found.result, found.cause) == ("True", ""), found
    assert rig.counted("True") == 1


async def test_partial_prompt_is_compared_up_to_its_image(rig, prepare):  # noqa: F811
    await rig.with_renderer()
    whole = await prepare(text("look "), image("a"), text(" and "), image("b", 56))
    images = (whole.images[0], replace(whole.images[1], unresolved="image_format:x"))
    found = await rig.asked(replace(whole, exactness="partial", images=images))
    assert (found.result, found.tokens) == ("True", whole.spans[1].offset)


@pytest.mark.parametrize("cause", ["template", "count", "identity"])
async def test_wrong_prediction_is_counted_with_its_cause(rig, prepare, cause):  # noqa: F811
    await rig.with_renderer()
    good = await prepare(text("look "), image("a"), text(" please"))
    span = good.spans[0]
    broken = {
        "template": {"ids": good.ids[:-1] + array("I", [1])},
        "count": {
            "ids": good.ids[: span.end] + good.ids[span.offset : span.offset + 2] + good.ids[span.end :],
            "spans": (replace(span, length=span.length + 2),),
        },
        "identity": {
            "spans": (replace(span, identity=b"o" * 32),),
            "images": (replace(good.images[0], identity=b"o" * 32),),
        },
    }[cause]
    bad, trace, sampler = replace(good, **broken), kept("r-1"), rig.sampler()
    sampler.offer(trace, bad, lambda: sent(good))
    rig.tasks.append(asyncio.create_task(sampler.run()))
    await rig.until(lambda: trace.rendering is not None)
    assert (trace.rendering.result, trace.rendering.cause) == ("False", cause)
    assert (rig.counted("False", cause), rig.counted("True")) == (1, 0)


async def test_failing_renderer_gives_unknown(rig, prepare):  # noqa: F811
    prompt = await prepare(text("look"))
    assert (await rig.asked(prompt)).cause == "renderer_nobody"
    await rig.with_renderer()
    other = replace(prompt, request=replace(prompt.request, body={**prompt.request.body, "messages": []}))
    found = await rig.asked(other)
    assert (found.result, found.cause) == ("Unknown", "renderer_refused")
    assert (rig.counted("Unknown", "renderer_nobody"), rig.counted("Unknown", "renderer_refused")) == (1, 1)


async def test_render_samples_and_bytes_are_bounded(rig, prepare):  # noqa: F811
    prompt = await prepare(text("look"), image("a"))
    body = sent(prompt)
    size = len(body) + 4 * len(prompt.ids)
    sampler = rig.sampler(queue=2)
    for number in range(5):
        sampler.offer(kept(f"r-{number}"), prompt, lambda: body)
    assert value(rig.metrics.parity_dropped) == 3
    tight, traces = rig.sampler(held=2 * size), [kept(f"r-{number}") for number in range(4)]
    for trace in traces:
        tight.offer(trace, prompt, lambda: body)
    assert value(rig.metrics.parity_dropped) == 5
    rig.tasks.append(asyncio.create_task(tight.run()))
    await rig.until(lambda: traces[1].rendering is not None)
    again = [kept("r-8"), kept("r-9")]
    for trace in again:  # what was compared is not held any more
        tight.offer(trace, prompt, lambda: body)
    await rig.until(lambda: all(trace.rendering is not None for trace in again))
    assert value(rig.metrics.parity_dropped) == 5


async def test_unsampled_request_holds_no_bytes(rig, prepare):  # noqa: F811
    prompt = await prepare(text("look"))
    sampler = rig.sampler(queue=1)
    sampler.offer(kept("unsampled"), prompt, lambda: b"{}")
    sampler.offer(kept("r-1"), replace(prompt, rendered=True), lambda: b"{}")
    sampler.offer(kept("r-2"), replace(prompt, exactness="affinity"), lambda: b"{}")
    assert sampler.queue.empty()
    assert value(rig.metrics.parity_dropped) == 0
