"""Prompts against renderings: a difference is named by cause and place; samples are bounded, never a false alarm.

The renderer of the sampled requests is the simulator's, behind the real client.
"""

import asyncio
import functools
from array import array
from dataclasses import replace
from types import SimpleNamespace

import orjson
import pytest
import uvicorn
from hypothesis import assume, given
from hypothesis import strategies as st
from unit.router.preparing import MODEL, image, text
from unit.router.rig import cancelled, loopback, value
from waiting import until

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.base.adapter import ImageRewrite
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.vllm.adapter import VLLM
from mmrouter_lib.media_identity import to_wire
from mmrouter_router.explain.decisions import DecisionTrace
from mmrouter_router.explain.differences import (
    AFTER,
    BEFORE,
    PredictedPrompt,
    RenderVerdict,
    Result,
    compare_rendering,
    predicted_prompt,
    rendering_json,
)
from mmrouter_router.fleet.workers import Member
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.request.renderer_client import Renderer
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.verify import sampling
from mmrouter_router.verify.sampling import RenderSampler
from mmrouter_sim import model
from mmrouter_sim.engine import simulated
from mmrouter_sim.vllm import app
from mmrouter_sim.vllm.flags import parse

PAD = 99
OTHER = b"o" * 32
texts = st.lists(st.integers(1, 60), max_size=12)
lengths = st.integers(1, 30)


def build(pieces) -> tuple["array[int]", tuple[Span, ...]]:
    """Ids and spans of texts (lists of tokens) and images (identity, tokens), in any order."""
    ids, spans = array("I"), []
    for piece in pieces:
        if isinstance(piece, list):
            ids.extend(piece)
        else:
            spans.append(Span(len(ids), piece[1], piece[0]))
            ids.extend([PAD] * piece[1])
    return ids, tuple(spans)


@st.composite
def prompts(draw) -> list:
    """Text, image, text ... with at least one image; texts may be empty, so images may touch."""
    pieces = [draw(texts)]
    for number in range(draw(st.integers(1, 4))):
        pieces += [(bytes([number]) * 32, draw(lengths)), draw(texts)]
    return pieces


def judged(ours, theirs, *, whole: bool = True) -> RenderVerdict:
    return compare_rendering(PredictedPrompt(*build(ours), whole=whole), *build(theirs))


def outcome(found: RenderVerdict) -> tuple[Result, str]:
    return found.result, found.cause


@given(prompts())
def test_equal_prompts_have_no_difference(pieces):
    found = judged(pieces, pieces)
    assert outcome(found) == ("True", "")
    assert found.tokens == len(build(pieces)[0])


@given(prompts(), st.data())
def test_text_difference_has_cause_template(pieces, data):
    where = data.draw(st.sampled_from(range(0, len(pieces), 2)))
    change = data.draw(st.sampled_from(["replaced", "added", "gone"]))
    text = list(pieces[where])
    assume(text or change == "added")
    at = data.draw(st.integers(0, len(text) - (change != "added")))
    text[at : at + (change != "added")] = [] if change == "gone" else [61]
    changed = [*pieces[:where], text, *pieces[where + 1 :]]
    for ours, theirs in ((pieces, changed), (changed, pieces)):
        found = judged(ours, theirs)
        assert outcome(found) == ("False", "template")
        same = next((n for n, (a, b) in enumerate(zip(build(ours)[0], build(theirs)[0], strict=False)) if a != b), None)
        if same is not None:
            assert f"token {same}:" in found.message
            assert found.first_token == max(0, same - BEFORE)


@given(prompts(), st.data())
def test_image_length_difference_has_cause_count(pieces, data):
    where = data.draw(st.sampled_from(range(1, len(pieces), 2)))
    identity, length = pieces[where]
    longer = [*pieces[:where], (identity, length + data.draw(lengths)), *pieces[where + 1 :]]
    for ours, theirs in ((pieces, longer), (longer, pieces)):
        found = judged(ours, theirs)
        assert outcome(found) == ("False", "count")
        assert f"image {where // 2 + 1} " in found.message


@given(prompts(), st.data())
def test_other_missing_or_extra_image_has_cause_identity(pieces, data):
    where = data.draw(st.sampled_from(range(1, len(pieces), 2)))
    changed, more = [*pieces[:where], (OTHER, data.draw(lengths)), *pieces[where + 1 :]], [*pieces, (OTHER, 3)]
    for ours, theirs in ((pieces, changed), (pieces, more), (more, pieces)):
        assert outcome(judged(ours, theirs)) == ("False", "identity")


def test_first_of_several_differences_counts():
    ours = [[1, 2], (b"a" * 32, 4), [3, 4], (b"b" * 32, 4), [5]]
    assert judged(ours, [[1, 2], (b"a" * 32, 5), [3, 7], (OTHER, 4), [5]]).cause == "count"
    assert judged(ours, [[1, 2], (b"a" * 32, 4), [3, 7], (OTHER, 4), [5]]).cause == "template"
    assert judged(ours, [[1, 2], (b"b" * 32, 4), [3, 4], (b"a" * 32, 4), [5]]).cause == "identity"


@given(prompts(), st.data())
def test_partial_prompt_is_compared_before_its_image(pieces, data):
    where = data.draw(st.sampled_from(range(1, len(pieces), 2)))
    known = pieces[:where]
    assert outcome(judged(known, [*known, (OTHER, data.draw(lengths)), data.draw(texts)], whole=False)) == ("True", "")
    text = judged(known, [*known, [61], (OTHER, 3)], whole=False)
    assert outcome(text) == ("False", "template")
    assert judged(known, known, whole=False).cause == "identity"


def test_both_sides_of_a_difference_are_shown():
    head = list(range(1, 41))
    found = judged([head, (b"a" * 32, 6), [50]], [head, (b"a" * 32, 9), [50]])
    shown = rendering_json(found, None)
    assert (shown["result"], shown["cause"], shown["tokens"]) == ("False", "count", 47)
    piece = shown["piece"]
    assert piece["first_token"] == 46 - BEFORE
    assert piece["predicted"]["tokens"] == [39, 40, *[PAD] * 6, 50]
    assert piece["rendered"]["tokens"] == [39, 40, *[PAD] * 9, 50]
    assert piece["rendered"]["text"] == "[39, 40][9 image tokens][50]"
    assert piece["rendered"]["images"][0]["starts_at"] == 2
    long = judged([head], [[7, *head]])
    assert len(long.predicted.ids) == len(long.rendered.ids) == AFTER


def prepared(pieces, exactness="exact", *, resolved=True, rendered=False) -> Prepared:
    ids, spans = build(pieces)
    images = tuple(SimpleNamespace(name=span.identity, resolved=resolved) for span in spans)
    return Prepared(None, None, images, ids, spans, exactness, (), 1, 1, rendered=rendered)


def test_only_own_predictions_are_compared():
    pieces = [[1, 2], (b"a" * 32, 4), [3]]
    ids, spans = build(pieces)
    assert predicted_prompt(prepared(pieces)) == PredictedPrompt(ids, spans)
    assert predicted_prompt(prepared(pieces, "partial", resolved=False)) == PredictedPrompt(ids[:2], (), whole=False)
    assert predicted_prompt(prepared(pieces[1:], "partial", resolved=False)) is None
    assert predicted_prompt(prepared([], "affinity")) is None
    assert predicted_prompt(prepared(pieces, rendered=True)) is None


@functools.cache
def simulated_renderer():
    """The simulator as a renderer; it keeps no request."""
    settings = parse(["launch", "render", str(MODEL), "--served-model-name", "t"])
    return app.build(simulated(settings, model.load("t", MODEL, chat_template=None, processor={})))


class Rig:
    def __init__(self) -> None:
        self.metrics, self.upstream = Metrics(), Upstream(connect_seconds=10)
        self.metrics.parity.describe("vllm", "qwen2_vl")
        self.renderer = Renderer(self.upstream, "k", "t", self.metrics)
        self.tasks: list[asyncio.Task] = []
        self.sockets: list[asyncio.Server] = []

    async def with_renderer(self) -> None:
        ip = loopback()
        # Only what serves: uvicorn's own loop looks at its signals every 0.1 s, which is how long it takes to end.
        config = uvicorn.Config(simulated_renderer(), host=ip, port=HTTP_PORT, lifespan="off", log_config=None)
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        self.sockets += server.servers
        self.renderer.roster([Member("render", "render", ip, "render", "renderer")])
        self.tasks.append(asyncio.create_task(self.renderer.run()))
        await until(lambda: self.renderer.usable)

    def sampler(self) -> RenderSampler:
        return RenderSampler(lambda request_id: "unsampled" not in request_id, self.renderer, self.metrics)

    async def asked(self, prepared, request_id="r-1"):
        """The outcome of one request."""
        sampler, trace = self.sampler(), kept(request_id)
        sampler.offer(trace, prepared, lambda: sent(prepared))
        self.tasks.append(asyncio.create_task(sampler.run()))
        await until(lambda: trace.rendering is not None)
        return trace.rendering

    def counted(self, result: str, cause: str = "") -> float:
        labels = {"engine": "vllm", "family": "qwen2_vl", "result": result, "cause": cause}
        return self.metrics.registry.get_sample_value("mmrouter_parity_total", labels) or 0


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    await cancelled(*rig.tasks)
    rig.upstream.close()
    for serving in rig.sockets:
        serving.close()
        await serving.wait_closed()


def kept(request_id: str) -> DecisionTrace:
    return DecisionTrace(request_id, None, 0, array("Q"), [])


def sent(prepared) -> bytes:
    images = [ImageRewrite(i.message, i.part, i.media.data_uri(), to_wire(i.identity)) for i in prepared.images]
    return orjson.dumps(VLLM.rewrite_chat(prepared.request.body, images, model="t", cache_salt="tenant").body)


async def test_prediction_of_a_known_family_matches_the_renderer(rig, prepare):
    await rig.with_renderer()
    found = await rig.asked(await prepare(text("look "), image("a"), text(" and "), image("b", 56), stream=True))
    assert (found.result, found.cause) == ("True", ""), found
    assert rig.counted("True") == 1


async def test_partial_prompt_is_compared_up_to_its_image(rig, prepare):
    await rig.with_renderer()
    whole = await prepare(text("look "), image("a"), text(" and "), image("b", 56))
    images = (whole.images[0], replace(whole.images[1], unresolved="image_format:x"))
    found = await rig.asked(replace(whole, exactness="partial", images=images))
    assert (found.result, found.tokens) == ("True", whole.spans[1].offset)


async def test_wrong_prediction_is_counted_with_its_cause(rig, prepare):
    await rig.with_renderer()
    good = await prepare(text("look "), image("a"), text(" please"))
    found = await rig.asked(replace(good, ids=good.ids[:-1] + array("I", [1])))
    assert (found.result, found.cause) == ("False", "template")
    assert (rig.counted("False", "template"), rig.counted("True")) == (1, 0)


async def test_failing_renderer_gives_unknown(rig, prepare):
    prompt = await prepare(text("look"))
    assert (await rig.asked(prompt)).cause == "renderer_unavailable"
    await rig.with_renderer()
    other = replace(prompt, request=replace(prompt.request, body={**prompt.request.body, "messages": []}))
    found = await rig.asked(other)
    assert (found.result, found.cause) == ("Unknown", "renderer_refused")
    assert (rig.counted("Unknown", "renderer_unavailable"), rig.counted("Unknown", "renderer_refused")) == (1, 1)


async def test_render_samples_and_bytes_are_bounded(rig, prepare, monkeypatch):
    prompt = await prepare(text("look"), image("a"))
    body = sent(prompt)
    size = len(body) + 4 * len(prompt.ids)
    monkeypatch.setattr(sampling, "RENDERINGS", 2)
    sampler = rig.sampler()
    for number in range(5):
        sampler.offer(kept(f"r-{number}"), prompt, lambda: body)
    assert value(rig.metrics.parity_dropped) == 3
    monkeypatch.setattr(sampling, "RENDERINGS", 64)
    monkeypatch.setattr(sampling, "HELD_BYTES", 2 * size)
    tight, traces = rig.sampler(), [kept(f"r-{number}") for number in range(4)]
    for trace in traces:
        tight.offer(trace, prompt, lambda: body)
    assert value(rig.metrics.parity_dropped) == 5
    rig.tasks.append(asyncio.create_task(tight.run()))
    await until(lambda: all(trace.rendering is not None for trace in traces[:2]))
    again = [kept("r-8"), kept("r-9")]
    for trace in again:  # what was compared is not held any more
        tight.offer(trace, prompt, lambda: body)
    await until(lambda: all(trace.rendering is not None for trace in again))
    assert value(rig.metrics.parity_dropped) == 5


async def test_unsampled_request_holds_no_bytes(rig, prepare):
    prompt = await prepare(text("look"))
    sampler = rig.sampler()
    sampler.offer(kept("unsampled"), prompt, lambda: b"{}")
    sampler.offer(kept("r-1"), replace(prompt, rendered=True), lambda: b"{}")
    sampler.offer(kept("r-2"), replace(prompt, exactness="affinity"), lambda: b"{}")
    assert sampler.queue.empty()
    assert value(rig.metrics.parity_dropped) == 0
