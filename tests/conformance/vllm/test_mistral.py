"""Models with Mistral's own tokenizer, ``tekken.json``: whole prompts by vLLM's own front end.

The tokenizers are the one that ``mistral_common`` brings, Pixtral's, and stand-ins for those of each version: its
pattern and its first tokens, with the special tokens of that version.
"""

import base64
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mistral_common
import pytest
from artefacts import Record
from conformance.conftest import Figure
from conformance.corpus import text_corpus
from conformance.engine_process import BLOCK_SIZE, engine
from conformance.own_code import Prompts
from conformance.prediction import Predictor, compare
from conformance.rendering import own_prompts
from conformance.test_text_models import COMPLETIONS, LAST, SMALL, TextPredictor, check_blocks, ours
from conformance.vllm.test_prediction import MOST_TOKENS, ask
from conformance.workload import (
    CODE,
    CONTINUED,
    EMOJI,
    SCRIPTS,
    STORY,
    WEATHER,
    Case,
    case,
    picture,
    said,
    user,
    workload,
)
from long_form import IS_LONG

from mmrouter_lib.engines.text_models import load_text_prompter
from mmrouter_lib.families import PromptImage
from mmrouter_lib.prompt.mistral import MistralPrompter

SOURCE = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
WHOLE = "the whole file of v3"
FIRST = "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]"
FIRST += " [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
SPECIAL = {"v3": "", "v7": "", "v11": " [ARGS] [CALL_ID]", "v13": " [ARGS] [CALL_ID] [THINK] [/THINK]"}
SPECIAL["v15"] = SPECIAL["v13"] + " [MODEL_SETTINGS] [/MODEL_SETTINGS]"
"""Version -> special tokens behind the first ones."""
SETTINGS = {
    "reasoning_effort": {"type": "enum", "accepts_none": True, "default": "none", "values": ["none", "low", "high"]},
    "json_schema": {"type": "json_schema", "accepts_none": False, "default": None},
}
VERSIONS = (*SPECIAL, WHOLE) if IS_LONG else ("v13",)
KEPT, RESERVED = 30_000, 1_000
DRAWN = 450
PICTURED = {"v13": {"image_patch_size": 14, "max_image_size": 1_540, "spatial_merge_size": 2}}
if IS_LONG:
    PICTURED["v3"] = {"image_patch_size": 16, "max_image_size": 1_024}
"""Version -> the sizes of images in tekken.json: of Mistral Small 3.1 and later, and of Pixtral-12B."""
TOWER = {
    **{
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_channels": 3,
    },
    **{"rope_theta": 10_000.0, "adapter_bias": False, "mm_projector_id": "patch_merge"},
    **{"add_pre_mm_projector_layer_norm": True},
    **{"image_token_id": 10, "image_break_token_id": 12, "image_end_token_id": 13},
}
PARAMS = {
    **{"dim": 64, "n_layers": 2, "head_dim": 32, "hidden_dim": 128, "n_heads": 2, "n_kv_heads": 2, "norm_eps": 1e-5},
    **{"vocab_size": 131_072, "rope_theta": 1e6, "max_seq_len": 32_768, "max_position_embeddings": 32_768},
}
"""The text model in params.json; :data:`TOWER` is the vision tower beside it."""
EXTREMES = ((1, 1), (3_000, 20), (20, 3_000), (5_000, 1), (1_540, 1_541), (1_541, 1_540), (28, 29), (4_000, 3_000))
NO_WEIGHTS = (2).to_bytes(8, "little") + b"{}"  # a file of safetensors without a tensor
EFFORTS = ("none", "high", "low", "medium")


def tekken(version: str) -> dict[str, Any]:
    whole = json.loads(SOURCE.read_text())
    names = (FIRST + SPECIAL[version]).split()
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    sizes = {"default_vocab_size": KEPT + RESERVED, "default_num_special_tokens": RESERVED, "num_vocab_tokens": KEPT}
    config = {**whole["config"], **sizes, "version": version}
    made = {"vocab": whole["vocab"][:KEPT], "special_tokens": special, "config": config, "version": 1, "type": "Tekken"}
    return made | ({"model_settings_builder": SETTINGS} if version == "v15" else {})


def pictured_folder(folder: Path, version: str) -> Path:
    """Write the folder of a model that takes images, in Mistral's format."""
    sizes = PICTURED[version]
    folder.mkdir()
    made = tekken(version) | {"multimodal" if version == "v3" else "image": sizes}
    side = {"image_size": sizes["max_image_size"], "max_image_size": sizes["max_image_size"]}
    tower = {**TOWER, **side, "patch_size": sizes["image_patch_size"]}
    tower["spatial_merge_size"] = sizes.get("spatial_merge_size", 1)
    (folder / "tekken.json").write_text(json.dumps(made))
    (folder / "params.json").write_text(json.dumps({**PARAMS, "vision_encoder": tower}))
    (folder / "config.json").write_text(json.dumps(SMALL | {"model_type": "mistral3"}))
    (folder / "consolidated.safetensors").write_bytes(NO_WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def pictured_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pictured")
    return {version: pictured_folder(root / version, version) for version in PICTURED}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = text_folders(tmp_path_factory.mktemp("mistral"))
    for folder in made.values():
        (folder / "consolidated.safetensors").write_bytes(NO_WEIGHTS)
    return made


def text_folders(root: Path) -> dict[str, Path]:
    """Write a folder of a model for texts with the tokenizer of each version."""
    made = {}
    for version in VERSIONS:
        folder = made[version] = root / version
        folder.mkdir()
        config = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 131_072}
        (folder / "config.json").write_text(json.dumps(SMALL | config))
        content = SOURCE.read_text() if version == WHOLE else json.dumps(tekken(version))
        (folder / "tekken.json").write_text(content)
    return made


def drawn() -> Iterator[Case]:
    """Conversations as Mistral's formats have them, and a few in which something is out of place."""
    draw = random.Random(7)
    words = [*STORY.split(), *SCRIPTS.split(), *EMOJI.split(), *CODE.split(" "), *FIRST.split(), "[THINK]", "\n", ""]
    bare = {"type": "function", "function": {"name": "now"}}
    strict = {"type": "function", "function": {"name": "sum", "description": "Adds.", "strict": True, "parameters": {}}}

    def text(most: int = 30) -> str:
        return draw.choice((" ", " ", "\n", "")).join(draw.choice(words) for _ in range(draw.randint(1, most)))

    def content() -> dict[str, Any]:
        parts = [text(12) for _ in range(draw.randint(1, 3))]
        return user(*parts, "") if draw.random() < 0.3 else user(text())

    def name() -> str:
        return "".join(draw.choice("abcdefghijKLMNO0123456789") for _ in range(draw.choice((9, 9, 9, 9, 24, 5))))

    def call(number: str) -> dict[str, Any]:
        arguments = json.dumps({"place": text(3), "n": draw.random()}, ensure_ascii=draw.random() < 0.5)
        arguments = draw.choice((arguments, arguments, arguments, "{}", "", '{"a":1}', "no JSON"))
        return {"id": number, "type": "function", "function": {"name": "weather", "arguments": arguments}}

    def calls() -> list[dict[str, Any]]:
        names = [name() for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        asked = {"role": "assistant", "content": draw.choice((None, None, "", text(5)))}
        asked["tool_calls"] = [call(each) for each in names]
        results = [{"role": "tool", "tool_call_id": each, "content": text(8)} for each in names]
        if draw.random() < 0.3:
            results = [{**one, "name": "weather"} for one in results]
        if draw.random() < 0.2:
            results = [{**user(text(4), text(4)), **{"role": "tool", "tool_call_id": each}} for each in names]
        return [asked, *(results if draw.random() < 0.95 else results[1:])]

    def answer() -> dict[str, Any]:
        made = said("assistant", text(20))
        if draw.random() < 0.15:
            made[draw.choice(("reasoning", "reasoning_content"))] = text(10)
        if draw.random() < 0.15:
            made = {**user(text(5), text(5)), "role": "assistant"}
        return made

    for number in range(DRAWN):
        history = [said("system", text(20))] if draw.random() < 0.5 else []
        extra: dict[str, Any] = {}
        if draw.random() < 0.5:
            extra["tools"] = draw.sample([WEATHER, bare, strict], draw.randint(1, 3))
        for _ in range(draw.randint(0, 3)):
            history += [content(), *(calls() if draw.random() < 0.5 else []), answer()]
        history.append(content())
        if draw.random() < 0.25:
            history += calls()
        if draw.random() < 0.1:
            history.insert(draw.randrange(len(history)), draw.choice((said("system", text(5)), content(), answer())))
        if draw.random() < 0.15:
            history.append(answer())
            extra |= CONTINUED
        if draw.random() < 0.1:
            extra["reasoning_effort"] = draw.choice(EFFORTS)
        if draw.random() < 0.1:
            extra["tool_choice"] = draw.choice(("none", "auto", "required")) if "tools" in extra else "none"
        yield case(f"mistral {number}", *history, **extra)


def cases() -> list[Case]:
    return [*text_corpus(), *drawn()]


@dataclass(frozen=True)
class Pictured:
    """A chat with images: their names in vLLM, and their sizes in pixels."""

    body: dict[str, Any]
    images: list[PromptImage]


def pictured(count: int = 100) -> Iterator[Pictured]:
    """Draw conversations with images of drawn sizes between texts."""
    draw = random.Random(13)
    extremes = iter(EXTREMES)
    for number in range(count):
        images: list[PromptImage] = []
        messages: list[dict[str, Any]] = [said("system", STORY)] if draw.random() < 0.3 else []
        for turn in range(draw.randint(1, 3)):
            messages += [said("assistant", "Yes.")] if turn else []
            parts: list[dict[str, object] | str] = []
            for _ in range(draw.randint(1, 3)):
                parts += [draw.choice((STORY, "[IMG]", "What?")) for _ in range(draw.randint(0, 2))]
                size = next(extremes, None) or (draw.randint(1, 700), draw.randint(1, 700))
                name = (number * 100 + len(images)).to_bytes(32, "big")
                url = f"data:image/png;base64,{base64.b64encode(picture(*size, seed=number)).decode()}"
                parts.append({"type": "image_url", "image_url": {"url": url}, "uuid": name.hex()})
                images.append(PromptImage(name, 1, size))
            messages.append(user(*parts, *(["Why?"] if draw.random() < 0.5 else [])))
        yield Pictured({"messages": messages}, images)


@pytest.fixture(scope="module")
def vllms(vllm_env: Path, folders: dict[str, Path], pictured_folders: dict[str, Path]) -> dict[Path, Prompts]:
    bodies = {"chats": [one.body for one in cases()], "completions": COMPLETIONS}
    images = {"chats": [one.body for one in pictured()], "context": 32_768}
    asked: dict[Path, dict[str, Any]]
    asked = {**dict.fromkeys(folders.values(), bodies), **dict.fromkeys(pictured_folders.values(), images)}
    return own_prompts(vllm_env, asked)


REFUSED_BY_VLLM = {"no tools in the list"}


@pytest.mark.adopts(engine="vllm", check="prompts of Mistral's tokenizers")
@pytest.mark.parametrize("version", VERSIONS)
def test_vllms_prompts_by_mistrals_tokenizer_are_the_predicted_ones(
    version: str, folders: dict[str, Path], vllms: dict[Path, Prompts], record: Record, figure: Figure
) -> None:
    prompter, theirs = load_text_prompter("vllm", folders[version]), vllms[folders[version]].listed()
    assert isinstance(prompter, MistralPrompter)
    wrong, compared, refused = [], 0, 0
    for one, answer in zip(cases(), theirs, strict=False):
        mine = ours(prompter, one)
        if isinstance(answer, list) and mine == answer:
            compared += 1
        elif isinstance(answer, list) or not (isinstance(mine, str) or one.name in REFUSED_BY_VLLM):
            wrong.append(f"{one.name}: {mine} for {answer}")
        else:
            refused += 1
    figure("conversations", compared)
    figure("mismatches", len(wrong))
    record(
        f"Mistral's tokenizer {version}: conversations, refused by both, mismatches", [compared, refused, len(wrong)]
    )
    assert "\n".join(wrong) == ""
    assert compared > 400
    for completion, ids in zip(COMPLETIONS, theirs[len(cases()) :], strict=True):
        special = bool(completion["add_special_tokens"])
        assert prompter.completion(str(completion["prompt"]), add_special_tokens=special).ids.tolist() == ids


@pytest.mark.adopts(engine="vllm", check="images in Mistral's format")
@pytest.mark.parametrize("version", PICTURED)
def test_vllms_prompts_with_images_in_mistrals_format_are_the_predicted_ones(
    version: str, pictured_folders: dict[str, Path], vllms: dict[Path, Prompts], record: Record, figure: Figure
) -> None:
    folder = pictured_folders[version]
    prompter, theirs = load_text_prompter("vllm", folder), vllms[folder].listed()
    wrong, images = [], 0
    for number, (one, answer) in enumerate(zip(pictured(), theirs, strict=True)):
        mine = prompter.prompt(one.body, one.images)
        spans = [[span.identity.hex(), span.offset, span.length] for span in mine.spans]
        images += len(spans)
        if answer != {"ids": mine.ids.tolist(), "images": spans}:
            wrong.append(f"{number}: {spans} for {str(answer)[:500]}")
    figure("conversations", len(theirs))
    figure("mismatches", len(wrong))
    record(
        f"images in Mistral's format {version}: conversations, images, mismatches", [len(theirs), images, len(wrong)]
    )
    assert "\n".join(wrong) == ""


@pytest.mark.long_form
def test_an_engines_blocks_by_mistrals_tokenizer_are_the_predicted_ones(
    vllm_env: Path, folders: dict[str, Path], tmp_path: Path, record: Record
) -> None:
    folder = folders["v13"]
    prompter = load_text_prompter("vllm", folder)
    predictor = TextPredictor(prompter.family, prompter, folder.name, BLOCK_SIZE)
    own = [one for one in drawn() if one.body.get("tool_choice") in (None, "none")][:60]
    check_blocks(vllm_env, folder, tmp_path / "engine.log", predictor, own, record, "vllm Mistral's tokenizer")


@pytest.mark.long_form
def test_an_engines_blocks_with_images_in_mistrals_format_are_the_predicted_ones(
    vllm_env: Path, pictured_folders: dict[str, Path], tmp_path: Path, record: Record
) -> None:
    folder, refused = pictured_folders["v13"], dict[str, int]()
    prompter = load_text_prompter("vllm", folder)
    predictor = Predictor(prompter.family, prompter, folder.name, BLOCK_SIZE)
    with engine(vllm_env, folder, tmp_path / "engine.log") as served:
        # vLLM answers an image that its EXIF orientation turns by a quarter with a 500.
        cases = [
            *(one for one in workload() if not one.name.startswith(("EXIF orientation 6", "EXIF orientation 8"))),
            LAST,
        ]
        exchanges = [made for one in cases for made in ask(served, predictor, one, refused, MOST_TOKENS)]
        served.listener.wait_for_prompt(exchanges[-1].prompt_ids)
        report = compare(exchanges, served.listener.batches(), predictor)
    record("prediction, vllm images in Mistral's format", report.line)
    assert report.mismatches == []
    assert report.matched == report.blocks > 100
    assert sum(exchange.image_tokens for exchange in exchanges) > 1000
