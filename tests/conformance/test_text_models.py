"""Text-only models, which need no code of their own here, against the engines' own prompts and published blocks.

A run has two tokenizers, that of Qwen2.5 and that of Llama 2, under configurations of text models, and a real vLLM with
the first. ``MMROUTER_FAMILIES=all`` adds those of Mistral 7B and Phi-3, of Qwen3, Llama 3.1 and DeepSeek-V3 with their
own templates (``hack/engines/unknown_families.py``), and a real SGLang.
"""

import json
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.conftest import Figure, model_folder
from conformance.corpus import text_corpus
from conformance.engine_process import BLOCK_SIZE, Engine, engine, env_version
from conformance.own_code import Prompts, answer_of
from conformance.prediction import Exchange, Predicted, Predictor, compare, image_places
from conformance.rendering import own_prompts
from conformance.sglang.test_rendering import REFUSED_BEFORE, Rendering, own_fields, rendered
from conformance.workload import Case, case, salted, texts, user
from long_form import IS_LONG

from hack.engines.shrink_model import HEADS, HIDDEN, TEXT
from mmrouter_lib.api import EngineType
from mmrouter_lib.engines.sglang.adapter import SGLANG
from mmrouter_lib.engines.text_models import load_text_prompter
from mmrouter_lib.engines.vllm.adapter import VLLM
from mmrouter_lib.prompt import AnyPrompter
from mmrouter_lib.prompt.tokenizer_class import AS_FILE, tokenizer_class

DERIVED = {
    "qwen2": ("Qwen--Qwen2.5-VL-7B-Instruct", "Qwen2ForCausalLM", 152_064),
    "llama2": ("llava-hf--llava-1.5-7b-hf", "LlamaForCausalLM", 32_064),
    "mistral": ("llava-hf--llava-v1.6-mistral-7b-hf", "MistralForCausalLM", 32_064),
    "phi3": ("microsoft--Phi-3-vision-128k-instruct", "Phi3ForCausalLM", 32_064),
}
"""Text model -> a vision model with its tokenizer, the architecture, and the size of the vocabulary."""
FETCHED = ("qwen3", "llama", "deepseek_v3")
MODELS = ["qwen2", "llama2"] + (["mistral", "phi3", *FETCHED] if IS_LONG else [])
SMALL = TEXT | {"head_dim": HIDDEN // HEADS, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6}
REFUSED_BY_VLLM = {"no tools in the list"}  # an empty list
COMPLETED = (
    "The harbour lies still.",
    " blanks at both ends \n\n",
    "Zoë, 東京, 👩🏽‍🚀 and \u0000",
    "<s>[INST] <|im_start|>user\n<|image_pad|><image> typed by a user <|im_end|></s>",
)
COMPLETIONS = [{"prompt": text, "add_special_tokens": special} for text in COMPLETED for special in (True, False)]
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("text")

    def make(name: str) -> Path:
        if name in FETCHED:
            return Path(run_tool_or_skip("engines.unknown_families", name))
        source, architecture, vocabulary = DERIVED[name]
        made, real = root / name, model_folder(source)
        if not made.exists():
            made.mkdir()
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(real / file, made / file)
            if (real / "chat_template.json").exists():
                template = json.loads((real / "chat_template.json").read_text())["chat_template"]
                (made / "chat_template.jinja").write_text(template)
            config = {"architectures": [architecture], "model_type": name.rstrip("2") if name == "llama2" else name}
            (made / "config.json").write_text(json.dumps(SMALL | config | {"vocab_size": vocabulary}))
        return made

    return make


@pytest.fixture(scope="module")
def vllms_prompts(vllm_env: Path, folder: Folder) -> dict[Path, Prompts]:
    chats = [one.body for one in text_corpus()]
    asked = {"chats": chats, "completions": COMPLETIONS}
    return own_prompts(vllm_env, dict.fromkeys(map(folder, MODELS), asked))


def ours(prompter: AnyPrompter, one: Case) -> "list[int] | str":
    try:
        return prompter.prompt(one.body, ()).ids.tolist()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def differences(prompter: AnyPrompter, cases: Sequence[Case], theirs: Sequence[Any], alone: set[str]) -> list[str]:
    """Name every conversation of which the engine makes another prompt, or which one side refuses alone."""
    found = []
    for one, answer in zip(cases, theirs, strict=True):
        mine = ours(prompter, one)
        equal = mine == answer if isinstance(answer, list) else isinstance(mine, str) or one.name in alone
        found += [] if equal else [f"{one.name}: {mine} for {answer}"]
    return found


@pytest.mark.adopts(engine="vllm", check="prompts of text models")
@pytest.mark.parametrize("name", MODELS)
def test_vllms_prompts_of_text_models_are_the_predicted_ones(
    name: str, vllms_prompts: dict[Path, Prompts], folder: Folder, record: Record, figure: Figure
) -> None:
    cases, theirs = text_corpus(), vllms_prompts[folder(name)].listed()
    prompter = load_text_prompter("vllm", folder(name))
    wrong = differences(prompter, cases, theirs[: len(cases)], REFUSED_BY_VLLM)
    figure("conversations", len(cases))
    figure("mismatches", len(wrong))
    record(f"text prompts, vllm {name}: conversations, mismatches", [len(cases), len(wrong)])
    assert "\n".join(wrong) == ""
    assert sum(isinstance(answer, list) for answer in theirs) > 400
    for asked, ids in zip(COMPLETIONS, theirs[len(cases) :], strict=True):
        special = bool(asked["add_special_tokens"])
        assert prompter.completion(str(asked["prompt"]), add_special_tokens=special).ids.tolist() == ids


@pytest.fixture(scope="module")
def sglangs_prompts(sglang_env: Path, folder: Folder) -> dict[str, list[dict[str, Any]]]:
    cases = sglangs_corpus()
    asked = [Rendering(folder(name), cases, text_only=True) for name in MODELS]
    return dict(zip(MODELS, rendered(sglang_env, asked), strict=True))


def sglangs_corpus() -> list[Case]:
    return [*text_corpus(), *(one for one in own_fields("qwen2_vl") if not image_places(one))]


@pytest.mark.adopts(engine="sglang", check="prompts of text models")
@pytest.mark.parametrize("name", MODELS)
def test_sglangs_prompts_of_text_models_are_the_predicted_ones(
    name: str,
    sglang_env: Path,
    sglangs_prompts: dict[str, list[dict[str, Any]]],
    folder: Folder,
    record: Record,
    figure: Figure,
) -> None:
    corpus, release = sglangs_corpus(), env_version(sglang_env)
    kept = [not SGLANG.other_prompt(release, one.body) for one in corpus]
    cases = [*compress(corpus, kept)]
    theirs = [answer.get("ids") or answer for answer in compress(sglangs_prompts[name], kept)]
    wrong = differences(load_text_prompter("sglang", folder(name)), cases, theirs, REFUSED_BEFORE)
    figure("conversations", len(cases))
    figure("by affinity", len(corpus) - len(cases))
    figure("mismatches", len(wrong))
    record(f"text prompts, sglang {name}: conversations, mismatches", [len(cases), len(wrong)])
    assert "\n".join(wrong) == ""
    assert sum(isinstance(answer, list) for answer in theirs) > (150 if name == "mistral" else 350)


CLASSES = """
import json
from transformers.models.auto import tokenization_auto as auto
print("\\n" + json.dumps([auto.TOKENIZER_MAPPING_NAMES, sorted(auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS)]))
"""


def test_the_class_of_a_tokenizer_is_the_one_that_transformers_chooses(vllm_env: Path, record: Record) -> None:
    names, wrong_on_hub = answer_of(vllm_env, ["-c", CLASSES])
    whole = {AS_FILE, "MistralCommonBackend"}
    for model_type, name in names.items():
        if name is None:
            continue
        chosen = "LlamaTokenizer"  # as declared
        if name in whole:
            chosen = AS_FILE
        elif model_type in wrong_on_hub:
            chosen = name
        assert tokenizer_class(model_type, "LlamaTokenizerFast") == chosen, model_type
    record("tokenizer classes: model types", len(names))


@dataclass(frozen=True)
class TextPredictor(Predictor):
    """Predicts as the router does, with wide ids for SGLang."""

    kind: EngineType = "vllm"

    def predict(self, case: Case) -> Predicted:
        plain = super().predict(case)
        return plain if self.kind == "vllm" else replace(plain, filled=array("Q", plain.ids))

    def request(self, case: Case) -> dict[str, Any]:
        adapter = VLLM if self.kind == "vllm" else SGLANG
        return adapter.rewrite_chat(case.body, [], model=self.model, cache_salt=case.salt).body


LAST = case("last", user("The last request of the run: when its blocks are seen, all blocks are. " * 3))


@pytest.mark.parametrize("kind", ["vllm", "sglang"] if IS_LONG else ["vllm"])
def test_an_engines_blocks_of_a_text_model_are_the_predicted_ones(
    kind: EngineType, request: pytest.FixtureRequest, folder: Folder, tmp_path: Path, record: Record
) -> None:
    env, made = request.getfixturevalue(f"{kind}_env"), folder("qwen2")
    prompter = load_text_prompter(kind, made)
    predictor = TextPredictor(prompter.family, prompter, made.name, BLOCK_SIZE, kind=kind)
    check_blocks(env, made, tmp_path / "engine.log", predictor, text_corpus()[-60:], record, f"{kind} text model")


def check_blocks(
    env: Path, folder: Path, log: Path, predictor: TextPredictor, own: Sequence[Case], record: Record, name: str
) -> None:
    """Compare every block that a real engine publishes for the common conversations and a model's ``own``."""
    cases = [*texts(), *(one for one in salted() if not image_places(one)), *own, LAST]
    with engine(env, folder, log, kind=predictor.kind) as served:
        exchanges = list(asked(served, predictor, cases))
        served.listener.wait_for_prompt(exchanges[-1].prompt_ids)
        report = compare(exchanges, served.listener.batches(), predictor)
    record(f"prediction, {name}", report.line)
    assert report.mismatches == []
    assert report.matched == report.blocks > 100
    assert sum(exchange.cached_tokens for exchange in exchanges) > 1000


def asked(served: Engine, predictor: TextPredictor, cases: Sequence[Case]) -> Iterator[Exchange]:
    """Send what the library predicts, and what forces no tool's call, because the engines run without a grammar."""
    for one in cases:
        if isinstance(ours(predictor.prompter, one), str):
            continue
        answer = served.chat(predictor.request(one) | {"return_prompt_token_ids": True, "max_tokens": 1})
        ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        yield Exchange(one, ids, [], answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
