"""A model that takes text only, behind a router on each engine type: exact, proved, and no key for an image."""

import json
import shutil
from collections.abc import Iterator

import openai
import pytest
from local.rig import ROOT, Deployment, deployed, example
from long_form import parameters
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

SETTLE_SECONDS = 60
TINY = ROOT / "examples" / "models" / "tiny-qwen2-vl"
IMAGE = {"type": "image_url", "image_url": {"url": data_uri(picture("a"))}}


@pytest.fixture(scope="module", params=parameters(["demo.yaml", "demo-sglang.yaml"], "demo.yaml"))
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("text")
    model = folder / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY / name, model / name)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 32768}
    (model / "config.json").write_text(json.dumps(config))
    resource = example(request.param)
    resource["spec"]["model"] = {"id": "test/text", "volume": {"hostPath": {"path": str(model)}}}
    resource["spec"]["pools"][0]["replicas"] = 2
    with deployed(folder, resource) as running:
        wait_for(running.settled, SETTLE_SECONDS, "both engines are verified")
        yield running


def test_texts_are_exact_and_the_gate_passes(deployment: Deployment) -> None:
    assert not any(deployment.state(number)["predicts_images"] for number in range(len(deployment.controls)))
    deployment.assert_gate_passes()


def test_a_completion_of_the_text_finds_its_own_blocks(deployment: Deployment) -> None:
    text = "The harbour lies still. " * 20
    client = deployment.client()
    for expected in (False, True):
        raw = client.completions.with_raw_response.create(model="demo", prompt=text, max_tokens=1)
        decision = deployment.decision(raw)
        assert decision["exactness"] == "exact"
        if not expected:
            wait_for(lambda: _held(deployment), SETTLE_SECONDS, "its blocks are published")
        else:
            assert decision["overlap"] > 0


def test_a_chat_with_an_image_has_no_key_and_the_engine_answers_it(deployment: Deployment) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}]
    with pytest.raises(openai.BadRequestError) as caught:
        deployment.client().chat.completions.create(model="demo", messages=messages, max_tokens=1)
    decision = deployment.decision(caught.value.response)
    assert (decision["exactness"], decision["reasons"]) == ("affinity", ["family:qwen3"])
    assert decision["blocks"] == 0


def _held(deployment: Deployment) -> bool:
    return any(deployment.keys(worker["uid"])["keys"] for worker in deployment.workers("worker"))
