"""A family that a router does not know, exact all the same: its prompts come from a renderer pool."""

import httpx
import pytest
import yaml
from e2e.rig import ROOT, running, wait_for
from e2e.test_breaks import Second, first_failure


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    resource = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
    spec = resource["spec"]
    spec["model"]["volume"]["hostPath"]["path"] = str(ROOT / "examples" / "models" / "tiny-qwen2-vl")
    spec["frontend"] = {"replicas": 1, "service": {"port": 8000}}
    spec["pools"][0]["replicas"] = 2
    spec["pools"].append({"name": "render", "role": "renderer", "replicas": 1, "accelerator": {"kind": "cpu"}})
    file = tmp_path_factory.mktemp("renderer") / "deployment.yaml"
    file.write_text(yaml.safe_dump(resource))
    with running(file) as deployment:
        yield deployment


def forget_the_family(router) -> None:
    router.preparer.family = router.preparer.prompter = None
    router.preparer.unknown_family = "unheard_of"


def request(second: Second, text: str, **fields) -> tuple[httpx.Response, dict]:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}
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
