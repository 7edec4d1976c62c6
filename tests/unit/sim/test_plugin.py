"""The plugin's routes in simulated engines: hand a processed image from a renderer to an engine, and use it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from unit.sim.conftest import CHAT

from handover.tests.support import without_bytes
from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_lib.engines.vllm.plugin_api import (
    ITEMS_PATH,
    RELEASE_PATH,
    RENDER_PATH,
    STATUS_PATH,
    items_request,
    read_items,
    read_render,
    read_status,
    release_request,
    render_request,
)
from mmrouter_lib.engines.vllm.stage_requests import read_rendered
from mmrouter_lib.media_identity import media_identity, to_wire
from mmrouter_sim import model
from mmrouter_sim.engine import SimulatedEngine, simulated
from mmrouter_sim.vllm.app import build
from mmrouter_sim.vllm.flags import parse

PNG = picture("a", 112, 84)
NAME = to_wire(media_identity(PNG, {}, key=bytes(32)))


def chat(**more: Any) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": data_uri(PNG)}, "uuid": NAME}
    content = [{"type": "text", "text": "look"}, image]
    return {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}


def loaded(tiny: Path, *command: str, flags: Sequence[str] = ()) -> SimulatedEngine:
    settings = parse([*command, str(tiny), "--served-model-name", "m", *flags])
    return simulated(settings, model.load("m", tiny, chat_template=None, processor={}))


def served(engine: SimulatedEngine) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=build(engine)), base_url="http://sim")


class Two:
    """A renderer and an engine of one node."""

    def __init__(self, tiny: Path, **flags: str) -> None:
        self.running: list[asyncio.Task[None]] = []
        self.renderer = self.client(tiny, "launch", "render")
        self.engine = self.client(tiny, "serve", **flags)

    def client(self, tiny: Path, *command: str, **flags: str) -> httpx.AsyncClient:
        more = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
        engine = loaded(tiny, *command, flags=more)
        assert engine.plugin is not None
        self.running.append(asyncio.create_task(engine.run()))
        return served(engine)

    async def close(self) -> None:
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    async def offered(self, *ways: str, inline_bytes: int = 1 << 20):
        request = render_request(chat(), ways=ways, seconds=5, images=[NAME], inline_bytes=inline_bytes)
        return read_render((await self.renderer.post(RENDER_PATH, json=request)).content)

    async def taken(self, offers):
        return read_items((await self.engine.post(ITEMS_PATH, content=items_request(offers, seconds=5))).content)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("VLLM_PLUGINS", "others,mmrouter")
    monkeypatch.setenv("MMROUTER_SHARED_DIR", str(tmp_path))
    monkeypatch.setenv("MMROUTER_HANDOVER_WAYS", "shm,nixl,inline")
    monkeypatch.setenv("NODE_NAME", "n")
    return tmp_path


@pytest_asyncio.fixture
async def two(environment: Path, tiny: Path) -> AsyncIterator[Two]:
    made = Two(tiny)
    yield made
    await made.close()


@pytest.mark.parametrize("way", ["shm", "inline"])
async def test_an_image_that_a_renderer_processed_needs_no_bytes_and_is_the_same_prompt(two, way):
    before = await two.engine.post(CHAT, json=without_bytes(chat(), [NAME]))
    assert (before.status_code, before.json()["error"]["message"][:14]) == (400, "Cache miss for")
    rendered = await two.offered("nixl", way)
    assert rendered.fell == (("nixl", "absent"),)
    assert (rendered.offers[NAME].way, rendered.withheld) == (way, {})
    assert (await two.taken(rendered.offers)).held == {NAME}
    answer = await two.engine.post(CHAT, json=without_bytes(chat(), [NAME]))
    assert answer.json()["usage"]["prompt_tokens"] == len(rendered.ids)
    assert (
        answer.json()["usage"]["prompt_tokens"]
        == (await two.engine.post(CHAT, json=chat())).json()["usage"]["prompt_tokens"]
    )


async def test_released_items_are_refused_and_held_ones_not_fetched_again(two):
    first, second = await two.offered("shm"), await two.offered("shm")
    assert (await two.renderer.post(RELEASE_PATH, json=release_request(first.lease))).json() == {"released": 1}
    assert (await two.taken(first.offers)).refused == {NAME: "stale"}
    assert (await two.taken(second.offers)).held == {NAME}
    await two.renderer.post(RELEASE_PATH, json=release_request(second.lease))
    assert (await two.taken(second.offers)).held == {NAME}  # from where it is


async def test_items_above_the_inline_limit_are_withheld(two):
    rendered = await two.offered("inline", inline_bytes=100)
    assert (rendered.offers, rendered.withheld) == ({}, {NAME: "large"})


async def test_engines_with_other_settings_refuse_items(environment, tiny):
    other = Two(tiny, mm_processor_kwargs='{"max_pixels": 3136}')
    assert (await other.taken((await other.offered("shm")).offers)).refused == {NAME: "settings"}
    await other.close()


async def test_each_side_reports_its_role_and_serves_only_its_routes(two):
    statuses = [read_status((await server.get(STATUS_PATH)).content) for server in (two.renderer, two.engine)]
    assert [(one.role, one.node, one.enabled) for one in statuses] == [("renderer", "n", True), ("engine", "n", True)]
    assert [[one.offers(way) for way in ("shm", "nixl", "inline")] for one in statuses] == [[True, False, True]] * 2
    assert statuses[0].settings == statuses[1].settings
    assert (await two.renderer.post(ITEMS_PATH, json={})).status_code == 404
    assert (await two.engine.post(RENDER_PATH, json={})).status_code == 404
    assert (await two.engine.post(ITEMS_PATH, json={"items": 1})).status_code == 400


async def test_without_the_plugin_named_there_are_no_such_routes(environment, tiny, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS")
    async with served(loaded(tiny, "serve")) as client:
        assert (await client.get(STATUS_PATH)).status_code == 404


RENDER = "/v1/chat/completions/render"


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def test_launch_render_takes_the_flags_of_serve():
    settings = parse(["launch", "render", "folder", "--port", "8100", "--limit-mm-per-prompt", '{"image": 2}'])
    assert (settings.renders, settings.model, settings.port, settings.image_limit) == (True, "folder", 8100, 2)
    assert not parse(["serve", "folder"]).renders
    with pytest.raises(SystemExit):
        parse(["launch", "bake", "folder"])


async def test_a_rendered_prompt_is_the_engines_and_names_its_images(two):
    body = chat(return_token_ids=True)
    answer = await two.renderer.post(RENDER, json=body | {"mm_payload": "none"})
    ids, spans = read_rendered(answer.content)
    assert (await two.renderer.get("/health")).status_code == 200
    assert (await two.renderer.post(CHAT, json=body)).status_code == 404
    wrong = await two.renderer.post(RENDER, json=body | {"model": "other"})
    assert ids.tolist() == (await two.engine.post(CHAT, json=body)).json()["prompt_token_ids"]
    assert [to_wire(span.identity) for span in spans] == [NAME]
    run = {ids[at] for at in range(spans[0].offset, spans[0].end)}
    assert len(run) == 1
    assert wrong.status_code == 404


async def test_an_engine_that_serves_does_not_render_without_the_flag_for_it(tiny):
    async with served(loaded(tiny, "serve")) as engine:
        assert (await engine.post(RENDER, json={"messages": []})).status_code == 403
