"""A renderer pool: prompts of a family that a router does not know, and the second opinion on those that it does."""

import shutil
from pathlib import Path

import httpx
import pytest
import yaml
from local.rig import ROOT, running
from local.test_broken_routing import Second, first_failure
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    resource = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
    spec = resource["spec"]
    spec["model"]["volume"]["hostPath"]["path"] = str(ROOT / "examples" / "models" / "tiny-qwen2-vl")
    spec["frontend"] = {"replicas": 1, "service": {"port": 8000}}
    spec["verification"] = {"sampleRatio": "1"}
    spec["pools"][0]["replicas"] = 2
    spec["pools"].append({"name": "render", "role": "renderer", "replicas": 1, "accelerator": {"kind": "cpu"}})
    file = tmp_path_factory.mktemp("renderer") / "deployment.yaml"
    file.write_text(yaml.safe_dump(resource))
    with running(file) as deployment:
        yield deployment


def forget_the_family(router) -> None:
    router.preparer.family = router.preparer.prompter = None
    router.preparer.unknown_family = "unheard_of"


def sampled(second: Second, content) -> dict:
    """What a renderer made of a request."""
    answer, _ = request(second, content)
    assert answer.status_code == 200
    headers = {"authorization": f"Bearer {second.demo.token}"}
    url = f"http://{second.ip}:8001/control/decisions/{answer.headers['x-mmrouter-request-id']}"

    def rendering():
        return httpx.get(url, headers=headers, timeout=10).json()["rendering"]

    return wait_for(rendering, 30, "the sample was shown to the renderer")


def parity(second: Second, result: str, cause: str) -> float:
    named = f'mmrouter_parity_total{{cause="{cause}",engine="vllm",family="qwen2_vl",result="{result}"}} '
    lines = httpx.get(f"http://{second.ip}:9090/metrics", timeout=10).text.splitlines()
    return sum(float(line.removeprefix(named)) for line in lines if line.startswith(named))


def request(second: Second, content, **fields) -> tuple[httpx.Response, dict]:
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}
    answer = httpx.post(f"http://{second.ip}:8000/v1/chat/completions", json=body, timeout=30)
    headers = {"authorization": f"Bearer {second.demo.token}"}
    url = f"http://{second.ip}:8001/control/decisions/{answer.headers['x-mmrouter-request-id']}"
    return answer, httpx.get(url, headers=headers, timeout=10).json()


def renderers(second: Second) -> list[bool]:
    headers = {"authorization": f"Bearer {second.demo.token}"}
    state = httpx.get(f"http://{second.ip}:8001/control/state", headers=headers, timeout=10).json()
    return [one["verified"] for one in state["renderers"]]


def test_an_unknown_family_passes_gate_and_canary_by_its_renderer(demo):
    second = Second(demo, workers=2)
    with second.running(forget_the_family):
        wait_for(lambda: renderers(second) == [True], 20, "the renderer answered")
        assert first_failure(second.gate()) is None
        assert second.compare() is None
        _, trace = request(second, "A bell rings over the empty quay. " * 6)
        assert (trace["exactness"], trace["reasons"]) == ("exact", ["renderer:unheard_of"])
        assert trace["blocks"] > 0


def test_without_an_answer_of_the_renderer_it_is_served_by_affinity_with_the_reason(demo):
    second = Second(demo, workers=2)

    def without(router):
        forget_the_family(router)
        router.renderer.roster = lambda members: None

    with second.running(without):
        answer, trace = request(second, "A bell rings over the empty quay. " * 6)
        assert answer.status_code == 200
        assert trace["exactness"] == "affinity"
        assert trace["reasons"] == ["renderer_nobody:unheard_of", "family:unheard_of"]


def test_a_known_family_is_sampled_and_its_renderer_agrees(demo):
    second = Second(demo, workers=2)
    with second.running():
        wait_for(lambda: renderers(second) == [True], 20, "the renderer answered")
        before = parity(second, "True", "")
        # Less than a block: nothing that the engine publishes, so what is counted is the rendering.
        found = sampled(second, "Hi")
        assert (found["result"], parity(second, "True", "") - before) == ("True", 1), found
        found = sampled(second, [image("quay"), {"type": "text", "text": "and"}, image("bell", 56)])
        assert found["result"] == "True", found
        assert found["tokens"] > 16


def test_a_template_that_is_not_the_renderers_is_counted_and_shown(demo, tmp_path):
    folder = Path(next(iter(demo.processes("router").values())).environ()["MMROUTER_MODEL_DIR"])
    shutil.copytree(folder, tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("Hello! " + template.read_text())
    second = Second(demo, tmp_path / "model", workers=2)
    with second.running():
        wait_for(lambda: renderers(second) == [True], 20, "the renderer answered")
        found = sampled(second, "Hi")
        assert (found["result"], found["cause"]) == ("False", "template")
        assert (parity(second, "False", "template"), parity(second, "True", "")) == (1, 0)
        assert found["piece"]["predicted"]["text"].startswith("Hello!")
        assert not found["piece"]["rendered"]["text"].startswith("Hello!")


def test_a_renderer_that_is_gone_is_unknown_and_never_a_difference(demo):
    def without(router):
        router.renderer.roster = lambda members: None

    second = Second(demo, workers=2)
    with second.running(without):
        found = sampled(second, "Hi")
        assert (found["result"], found["cause"]) == ("Unknown", "renderer_nobody")
        assert parity(second, "Unknown", "renderer_nobody") == 1


def image(seed: str, side: int = 112) -> dict:
    return {"type": "image_url", "image_url": {"url": data_uri(picture(seed, side, side))}}
