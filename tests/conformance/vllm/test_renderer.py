"""The router's renderer client against a real ``vllm launch render``, started with the product's own command line.

The families here are ones that the library knows, so its own prediction says what the answer has to be.
"""

import asyncio
import json
from pathlib import Path

import pytest
from artefacts import Record
from conformance.conftest import Shrunk
from conformance.engine_process import BLOCK_SIZE, context_length, parsed
from conformance.prediction import Predictor, image_places
from conformance.rendering import renderer
from conformance.workload import workload
from long_form import parameters

from mmrouter_lib.engines.vllm.launch import launch
from mmrouter_router.fleet.workers import Member
from mmrouter_router.http.engine_requests import EngineRequestError
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.renderer_client import Renderer
from mmrouter_router.telemetry.metrics import Metrics

KEY = "renderer-key"
MOST_TOKENS = 3500
"""Longer prompts may leave a model's context."""
FAMILIES = ("Qwen/Qwen2-VL-2B-Instruct", "llava-hf/llava-1.5-7b-hf")


def flags(model_dir: Path) -> list[str]:
    """What the product adds to ``vllm launch render MODEL --host ... --port ...``."""
    pool = {"name": "render", "role": "renderer", "accelerator": {"kind": "cpu"}}
    worker = {"name": "worker", "role": "worker", "accelerator": {"kind": "cpu"}}
    spec = {
        "model": {"id": f"test/{model_dir.name}", "servedName": model_dir.name, "volume": {"emptyDir": {}}},
        "engine": {"type": "vllm", "blockSize": BLOCK_SIZE},
        "pools": [worker, pool],
    }
    dep = parsed(spec)
    made = launch(dep, dep.spec.pools[1])
    assert made.command == ["vllm", "launch", "render"]
    rest = made.args[1:]
    for name in ("--host", "--port"):  # the rig's own
        at = rest.index(name)
        del rest[at : at + 2]
    return [*rest, "--max-model-len", str(context_length(model_dir))]


@pytest.mark.parametrize("repository", parameters(FAMILIES, FAMILIES[0]))
def test_rendered_prompts_are_the_librarys_token_for_token_and_image_for_image(
    vllm_env: Path, shrunk: Shrunk, repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Record
):
    model_dir = shrunk(repository)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    predictor = Predictor.load(model_dir, BLOCK_SIZE)
    with renderer(vllm_env, model_dir, tmp_path / "renderer.log", *flags(model_dir)) as running:
        ip = running.client.base_url.host
        compared, images = asyncio.run(compare(predictor, model_dir, ip))
    record(f"renderer {model_dir.name}", f"prompts {compared}, images {images}, mismatches 0")


async def compare(predictor: Predictor, model_dir: Path, ip: str) -> tuple[int, int]:
    upstream, metrics = Upstream(), Metrics()
    client = Renderer(upstream, KEY, model_dir.name, metrics)
    client.roster([Member("render-0", "render-0", ip, "render", "renderer")])
    probing = asyncio.create_task(client.run())
    compared = images = 0
    try:
        async with asyncio.timeout(60):
            while not client.usable:
                await asyncio.sleep(0.1)
        for case in workload():
            if len(image_places(case)) > 8:
                continue
            try:
                predicted = predictor.predict(case)
            except ValueError:
                with pytest.raises(EngineRequestError):
                    await client.render(predictor.request(case))
                continue
            if len(predicted.ids) > MOST_TOKENS:
                continue
            body = predictor.request(case)
            ids, spans = await client.render(body)
            assert ids.tolist() == predicted.ids.tolist(), case.name
            assert spans == predicted.spans, case.name
            assert await client.render(json.loads(json.dumps(body))) == (ids, spans)
            compared += 1
            images += len(spans)
        stranger = Renderer(upstream, "another-key", model_dir.name, metrics)
        stranger.roster([Member("render-0", "render-0", ip, "render", "renderer")])
        stranger._answered.add("render-0")
        with pytest.raises(EngineRequestError, match="401"):
            await stranger.render({"model": model_dir.name, "messages": [{"role": "user", "content": "hello"}]})
    finally:
        probing.cancel()
        upstream.close()
    assert compared >= 20
    assert images >= 10
    assert metrics.registry.get_sample_value("mmrouter_rendered_total", {"source": "cache"}) >= compared
    return compared, images
