"""A real encoder and a real engine that takes its embeddings: exact as ever, and with the same answers as one engine's.

Both are stock vLLM, connected by files in a folder that they share, because on a CPU its other connectors do not run.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from conformance.rig import ONE_PROCESS, engine_args, require_memory
from local.rig import Deployment, running
from scenarios import Chat, assert_only_text, assert_whole

from mmrouter.engines.vllm import API_KEY_ENV

BLOCK = 32
REPOSITORY = "Qwen/Qwen2-VL-2B-Instruct"
SHARED = "/var/lib/mmrouter/shared"
MAX_PIXELS = 200_704
"""An encoder measures its largest image when it starts: minutes on a CPU, unless images are small."""


def resource(model_dir: Path) -> dict[str, Any]:
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **ONE_PROCESS,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    env = [{"name": key, "value": value} for key, value in environment.items()]

    def pool(role: str) -> dict[str, Any]:
        return {
            "name": role,
            "role": role,
            "replicas": 1,
            "accelerator": {"kind": "cpu"},
            "sharedMemory": {"scope": "node"},
            "podTemplate": {"spec": {"containers": [{"name": "engine", "env": env}]}},
        }

    return {
        "apiVersion": "mmrouter.io/v1alpha1",
        "kind": "MMRouterDeployment",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"id": REPOSITORY, "volume": {"hostPath": {"path": str(model_dir)}}},
            "engine": {
                "type": "vllm",
                "blockSize": BLOCK,
                "processor": {"maxPixels": MAX_PIXELS},
                "ecConnector": {
                    "ec_connector": "ECExampleConnector",
                    "ec_connector_extra_config": {"shared_storage_path": SHARED},
                },
                "args": engine_args(),
            },
            "frontend": {"replicas": 1, "service": {"port": 8000}},
            "pools": [pool("encoder"), pool("worker")],
        },
    }


@pytest.fixture(scope="module")
def deployment(
    vllm_env: Path, shrunk: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    require_memory()
    file = tmp_path_factory.mktemp("encoders") / "deployment.yaml"
    file.write_text(yaml.safe_dump(resource(shrunk(REPOSITORY))))
    with running(file, "--engines", "path", "--engine-env", str(vllm_env), start_seconds=650) as deployment:
        yield deployment


@pytest.fixture
def chat(deployment: Deployment) -> Iterator[Chat]:
    with ExitStack() as stack:
        control = stack.enter_context(deployment.control())
        yield Chat("demo", stack.enter_context(deployment.client()), [control])


def decision(deployment: Deployment) -> dict[str, Any]:
    """Return the newest decision of a client's request."""
    with deployment.control() as control:
        newest = control.get("/control/decisions").raise_for_status().json()[0]
        found: dict[str, Any] = control.get(f"/control/decisions/{newest['request_id']}").raise_for_status().json()
    return found


def engine_key(deployment: Deployment, pod: str) -> str:
    """Return the key that a pod's engine asks for, from its environment."""
    for child in psutil.Process(deployment.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            environment = child.environ()
            if environment.get("POD_NAME") == pod and API_KEY_ENV in environment:
                return str(environment[API_KEY_ENV])
    raise AssertionError(f"no engine runs in {pod}")


def test_the_gate_passes(deployment: Deployment) -> None:
    done = deployment.mmrouter("verify", deployment.url)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_image_is_encoded_by_the_encoder_and_its_blocks_are_predicted(deployment: Deployment, chat: Chat) -> None:
    a, b = chat.image("a"), chat.image("b")
    # Long enough that the last image lies in complete blocks: then a repeat needs no encoder.
    question = "What is to be seen in these two pictures, and in which of them is more of it? " * 4
    first = chat.send(a, b, question)
    seen = decision(deployment)
    stages = [(note["stage"], note["outcome"]) for note in seen["chain"]]
    assert stages == [("encode", "done"), ("answer", "first_byte")]
    assert seen["chain"][0]["images"] == 2
    assert_whole(first, chat.send(a, b, question))
    assert decision(deployment)["chain"][0]["outcome"] == "held"
    assert_only_text(chat.send(b, a, question))


def test_answers_are_the_same_whoever_encodes(deployment: Deployment, chat: Chat) -> None:
    messages = chat.messages(chat.image("c"), "what?")
    body = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0}
    through = chat.client.chat.completions.create(**body)
    assert decision(deployment)["chain"][0]["outcome"] == "done"
    (worker,) = (each for each in deployment.state()["workers"] if each["role"] == "worker")
    key = engine_key(deployment, worker["name"])
    # Without an identity of ours the worker takes the image for another one, which nobody encoded for it.
    alone = httpx.post(
        f"http://{worker['ip']}:8000/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {key}"},
        timeout=120,
    ).raise_for_status()
    assert alone.json()["choices"][0]["message"]["content"] == through.choices[0].message.content
    assert alone.json()["usage"]["prompt_tokens_details"]["cached_tokens"] < through.usage.prompt_tokens - BLOCK
