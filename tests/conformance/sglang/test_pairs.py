"""A real prefill and a real decode engine of SGLang, which hand KV blocks over by Mooncake.

It takes an environment whose PyTorch has devices: 0.5.23 pins memory and records events of CUDA when it sends blocks by
Mooncake, and tells NIXL that its cache is a device's, which NIXL refuses where it is a CPU's. Without one the wire is
compared alone (``test_wire.py``).
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conformance.engine_process import START_SECONDS, require_memory
from conformance.resources import sglang_manifest
from local.rig import Deployment, running
from local.staged_deployments import MEDIA, decided
from local.test_scenarios import Folder, web
from scenarios import SCENARIOS, Chat, Scenario, open_chat, title
from waiting import wait_for

__all__ = ["web"]

REPOSITORY = "Qwen/Qwen2.5-VL-7B-Instruct"
IMAGE = "example.invalid/sglang:0.5.23"  # there is no default one for CPUs; processes need none
PROVE_SECONDS = 120.0
SENDS = """
import torch
torch.empty(1, pin_memory=True)
torch.cuda.Event().record(torch.cuda.current_stream())
import mooncake.engine
"""
"""What the sending engine does first (``send_kv_chunk`` of 0.5.23)."""


@pytest.fixture(scope="module")
def pair(
    sglang_env: Path, shrunk: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    require_memory()
    tried = subprocess.run([str(sglang_env / "bin" / "python"), "-c", SENDS], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"not run: what SGLang does to send blocks fails here: {tried.stderr.strip().splitlines()[-1]}")
    file = tmp_path_factory.mktemp("pairs") / "deployment.yaml"
    connector = {"transferBackend": "mooncake_tcp"}
    pools = [("prefill", 1), ("decode", 1)]
    made = sglang_manifest(shrunk(REPOSITORY), REPOSITORY, pools, kvConnector=connector)
    file.write_text(yaml.safe_dump(made | {"spec": made["spec"] | {"routing": {"media": MEDIA}}}))
    with running(file, "--engines", "path", "--engine-env", str(sglang_env), start_seconds=START_SECONDS) as deployment:
        wait_for(lambda: proved(deployment), PROVE_SECONDS, "both engines are verified by their half of an answer")
        yield deployment


def proved(deployment: Deployment) -> bool:
    standings = {(worker["role"], worker["standing"]) for worker in deployment.state()["workers"]}
    return standings == {("prefill", "verified"), ("decode", "verified")}


@pytest.fixture
def chat(pair: Deployment) -> Iterator[Chat]:
    with open_chat(pair) as chat:
        yield chat


def test_the_gate_passes(pair: Deployment) -> None:
    done = pair.mmrouter("verify", pair.url)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_engines_answer_together_and_the_prefills_cache_is_what_was_predicted(pair: Deployment, chat: Chat) -> None:
    question = "What is to be seen here, and what of it is in the middle? " * 4
    first = decided(pair, chat, chat.image("one"), question)
    again = decided(pair, chat, chat.image("one"), question)
    roles = {worker["name"]: worker["role"] for worker in pair.state()["workers"]}
    assert (roles[again["worker"]], roles[again["answers"]], again["form"]) == ("prefill", "decode", "prefill-decode")
    assert [(note["stage"], note["outcome"]) for note in again["chain"]] == [
        ("prefill", "done"),
        ("answer", "first_byte"),
    ]
    assert again["exactness"] == "exact"
    assert again["overlap"] == len(again["keys"]) > first["overlap"]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_a_streamed_answer_is_the_whole_one(chat: Chat) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 8, "temperature": 0}
    messages = chat.messages(chat.image("streamed"), "what?")
    whole = chat.client.chat.completions.create(messages=messages, **asked).choices[0].message.content
    stream = chat.client.chat.completions.create(messages=messages, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
