"""`vllm launch render`, simulated: the prompt routes of an engine, and no other."""

from pathlib import Path

import httpx
import pytest

from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_lib.engines.vllm.renderer import read_rendered
from mmrouter_lib.media_identity import media_identity, to_wire
from mmrouter_sim import model
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.settings import Settings
from mmrouter_sim.vllm.app import build
from mmrouter_sim.vllm.flags import parse

RENDER = "/v1/chat/completions/render"


def client(settings: Settings, folder: Path) -> httpx.AsyncClient:
    engine = SimulatedEngine(settings, model.load("m", folder, chat_template=None, processor={}))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=build(engine)), base_url="http://sim")


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def test_launch_render_takes_the_flags_of_serve():
    settings = parse(["launch", "render", "folder", "--port", "8100", "--limit-mm-per-prompt", '{"image": 2}'])
    assert (settings.renders, settings.model, settings.port, settings.image_limit) == (True, "folder", 8100, 2)
    assert not parse(["serve", "folder"]).renders
    with pytest.raises(SystemExit):
        parse(["launch", "bake", "folder"])


async def test_a_rendered_prompt_is_the_tokenized_one_and_names_its_images(tiny):
    png = picture("a", 112, 84)
    identity = media_identity(png, {}, key=bytes(32))
    image = {"type": "image_url", "image_url": {"url": data_uri(png)}, "uuid": to_wire(identity)}
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "look"}, image]}]}
    async with client(parse(["launch", "render", str(tiny), "--served-model-name", "m"]), tiny) as renderer:
        answer = await renderer.post(RENDER, json=body | {"mm_payload": "none"})
        ids, spans = read_rendered(answer.content)
        tokens = (await renderer.post("/tokenize", json=body)).json()["tokens"]
        assert (await renderer.get("/health")).status_code == 200
        assert (await renderer.post("/v1/chat/completions", json=body)).status_code == 404
        wrong = await renderer.post(RENDER, json=body | {"model": "other"})
    assert ids.tolist() == tokens
    assert [span.identity for span in spans] == [identity]
    run = {ids[at] for at in range(spans[0].offset, spans[0].end)}
    assert len(run) == 1
    assert wrong.status_code == 404


async def test_an_engine_that_serves_does_not_render(tiny):
    async with client(parse(["serve", str(tiny), "--served-model-name", "m"]), tiny) as engine:
        assert (await engine.post(RENDER, json={"messages": []})).status_code == 404
