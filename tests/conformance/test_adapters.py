"""LoRA adapters on real engines: each is a model of its own name, with blocks of its own."""

import json
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from artefacts import Record
from conformance.conftest import ROOT, Shrunk
from conformance.engine_process import BLOCK_SIZE, require_memory
from conformance.engines import Answer, deployed, manifest, pool, sglang_manifest, vllm_engine
from conformance.workload import STORY, Case, case, image_part, picture, said, user
from local.rig import Deployment
from long_form import parameters
from waiting import wait_for

from hack.engines.shrink_model import HEADS, HIDDEN, TEXT

REPOSITORIES = {"vllm": "Qwen/Qwen2-VL-2B-Instruct", "sglang": "Qwen/Qwen2.5-VL-7B-Instruct"}
ADAPTERS = ("sql", "team:sql")
MODELS = ("demo", *ADAPTERS)
RANK = 8
SETTLE_SECONDS = 120.0
AGREE_SECONDS = 60.0


@dataclass(frozen=True)
class Served:
    engine: str
    deployment: Deployment

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"x-mmrouter-control": self.deployment.token}
        return httpx.post(f"{self.deployment.url}{path}", json=body, headers=headers, timeout=120)

    def ask(self, model: str, one: Case) -> Answer:
        """Send a chat to a model, and wait until the engine has published its blocks."""
        answer = self.post("/v1/chat/completions", {"model": model, "max_tokens": 1, "temperature": 0, **one.body})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == (model if self.engine == "vllm" or ":" not in model else "demo")
        seen = Answer(one, answer.headers, answer.json()["usage"], self.deployment.decision(answer))
        self.until_published(seen.keys, f"{model}, {one.name}: every predicted key")
        return seen

    def until_published(self, keys: list[str], what: str) -> None:
        (worker,) = self.deployment.state()["workers"]

        def published() -> bool:
            return set(keys) <= set(self.deployment.keys(worker["uid"])["keys"].get("0", ()))

        wait_for(published, AGREE_SECONDS, f"{what} is published")


@pytest.fixture(scope="module", params=parameters(REPOSITORIES, "sglang"))
def served(
    request: pytest.FixtureRequest, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    engine: str = request.param
    require_memory()
    env: Path = request.getfixturevalue(f"{engine}_env")
    folder, repository = shrunk(REPOSITORIES[engine]), REPOSITORIES[engine]
    root = tmp_path_factory.mktemp(f"adapters-{engine}")
    for number in range(len(ADAPTERS)):
        write_adapter(root / "adapters" / str(number), number)
    loaded = [f"{name}=/adapters/{number}" for number, name in enumerate(ADAPTERS)]
    if (
        engine == "sglang"
    ):  # it reads adapters by the loader of the model's weights, of which that of dummies reads none
        folder = Path(shutil.copytree(folder, root / "model"))
        script = ROOT / "hack" / "engines" / "shrink_model.py"
        subprocess.run([env / "bin" / "python", script, "--weights", folder], check=True, timeout=600)
    if engine == "vllm":
        args = ("--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", *loaded)
        made = manifest(folder, vllm_engine(folder, *args), [pool("worker")], repository=repository)
    else:
        args = ("--load-format", "safetensors", "--lora-backend", "torch_native", "--lora-paths", *loaded)
        made = sglang_manifest(folder, repository, [("worker", 1)], *args)
    pod = made["spec"]["pools"][0]["podTemplate"]["spec"]
    shared = {"adapters": root / "adapters", "unpinned": Path(__file__).parent / "sglang" / "unpinned"}
    pod["volumes"] = [{"name": name, "hostPath": {"path": str(path)}} for name, path in shared.items()]
    (container,) = pod["containers"]
    container["volumeMounts"] = [{"name": name, "mountPath": f"/{name}"} for name in shared]
    if engine == "sglang":
        container["env"] = [*container["env"], {"name": "PYTHONPATH", "value": "/unpinned"}]
    with deployed(env, root, made) as deployment:
        wait_for(deployment.settled, SETTLE_SECONDS, "a verified engine")
        yield Served(engine, deployment)


def write_adapter(folder: Path, seed: int) -> None:
    """Write an adapter of the shrunk models' queries and values, with weights of its own."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    config |= {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, "base_model_name_or_path": "demo"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draw, header, body = random.Random(seed), dict[str, Any](), b""
    for layer in range(int(TEXT["num_hidden_layers"])):
        for target in config["target_modules"]:
            for part, shape in (("A", (RANK, HIDDEN)), ("B", (HEADS * (HIDDEN // HEADS), RANK))):
                values = [draw.uniform(-0.1, 0.1) for _ in range(shape[0] * shape[1])]
                raw = struct.pack(f"<{len(values)}f", *values)
                name = f"base_model.model.model.language_model.layers.{layer}.self_attn.{target}.lora_{part}.weight"
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(body), len(body) + len(raw)]}
                body += raw
    raw = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + body)


def test_the_model_list_has_every_adapter_below_the_model(served: Served) -> None:
    rows = httpx.get(f"{served.deployment.url}/v1/models").json()["data"]
    assert [(row["id"], row["parent"]) for row in rows] == [("demo", None), *((name, "demo") for name in ADAPTERS)]


def test_each_model_finds_its_own_blocks_exactly_and_never_anothers(served: Served, record: Record) -> None:
    one = case("a talk of adapters", user(STORY))
    longer = case("its next turn", user(STORY), said("assistant", "I see."), user("And then? " + STORY[:300]))
    keys: dict[str, list[str]] = {}
    for model in MODELS:
        first = served.ask(model, one)
        assert (first.exactness, first.overlap, first.cached) == ("exact", 0, 0), model
        again = served.ask(model, one)
        assert (again.exactness, again.overlap, again.cached) == ("exact", again.blocks, again.most), model
        later = served.ask(model, longer)
        assert later.exactness == "exact"
        assert later.overlap * BLOCK_SIZE == later.cached > 0, model
        keys[model] = later.keys
    assert len(set().union(*keys.values())) == sum(map(len, keys.values()))
    record(f"adapters, {served.engine}: blocks of each model", {model: len(found) for model, found in keys.items()})


def test_completions_of_each_model_find_their_own_blocks(served: Served) -> None:
    prompt = f"Once more. {STORY}"
    for model in MODELS:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        first = served.post("/v1/completions", body)
        assert (first.headers["x-mmrouter-exactness"], first.headers["x-mmrouter-overlap-blocks"]) == ("exact", "0")
        keys = served.deployment.decision(first)["keys"]
        served.until_published(keys, f"{model}: the completion's keys")
        again = served.post("/v1/completions", body)
        assert int(again.headers["x-mmrouter-overlap-blocks"]) == len(keys) > 1
        usage = again.json()["usage"]
        most = (usage["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert usage["prompt_tokens_details"]["cached_tokens"] == min(len(keys) * BLOCK_SIZE, most)


def test_an_image_is_found_again_by_its_adapter_alone(served: Served) -> None:
    shown = case("a picture", user("Look. " + STORY[:400], image_part(picture(196, 196, seed=77)), STORY[:400]))

    def known() -> bool:
        return served.ask("sql", shown).exactness == "exact"  # SGLang's name of an image is learned first

    wait_for(known, SETTLE_SECONDS, "the image is known")
    again = served.ask("sql", shown)
    assert (again.exactness, again.overlap, again.cached) == ("exact", again.blocks, again.most)
    other = served.ask("demo", shown)
    assert (other.exactness, other.overlap, other.cached) == ("exact", 0, 0)


def test_a_name_that_no_engine_has_is_not_found(served: Served) -> None:
    answer = served.post("/v1/chat/completions", {"model": "none", "messages": [user("x")]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_responses_are_an_adapters_or_refused(served: Served) -> None:
    answer = served.post("/v1/responses", {"model": "sql", "input": STORY, "max_output_tokens": 4})
    if served.engine == "vllm":
        assert (answer.status_code, answer.json()["model"]) == (200, "sql")
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
