"""Models with Mistral's own tokenizer, ``tekken.json``: whole prompts by SGLang's own code.

The tokenizers are those of ``tests/conformance/vllm/test_mistral.py``. Folders with images have those of Mistral 3 in
Hugging Face's format, as they are published beside this tokenizer.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.conftest import Figure
from conformance.corpus import corpus
from conformance.engine_process import BLOCK_SIZE, env_version
from conformance.own_code import answer_of
from conformance.prediction import MAX_PIXELS, decode
from conformance.sglang.test_images import drawn as drawn_images
from conformance.sglang.test_rendering import (
    REFUSED_BEFORE,
    Rendering,
    compared,
    folder_of,
    own_fields,
    own_prompts,
    rendered,
)
from conformance.sglang.test_responses import drawn_requests, predicted
from conformance.sglang.test_stand_ins import (
    NamedPredictor,
    check_images_are_learned,
    compare_pages,
    drawn_for,
    load,
    named,
)
from conformance.test_text_models import TextPredictor, check_blocks, differences
from conformance.vllm.test_mistral import VERSIONS, cases, tekken, text_folders
from conformance.vllm.test_mistral import drawn as drawn_chats
from conformance.vllm.test_sentencepiece import PROGRAM, drawn_texts
from conformance.workload import STORY, Case, case, said, user
from long_form import IS_LONG

from mmrouter_lib.engines.base.release_order import is_before
from mmrouter_lib.engines.sglang.adapter import SGLANG
from mmrouter_lib.engines.sglang.families.pixtral import SglangPixtral
from mmrouter_lib.engines.sglang.prompts.mistral import SglangMistralPrompter
from mmrouter_lib.engines.text_models import load_text_prompter
from mmrouter_lib.families import Expanded, Family
from mmrouter_lib.image_size import probe
from mmrouter_lib.prompt import PromptImage

LAYOUTS = ("beside", "alone") if IS_LONG else ("beside",)
"""Whether tekken.json is beside a tokenizer.json or alone in the folder of a model with images."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = text_folders(tmp_path_factory.mktemp("mistral"))
    for folder in made.values():
        (folder / "chat_template.jinja").write_text("{{ messages }}")  # which the engine never reads
    return made


@pytest.fixture(scope="module")
def pictured_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, made = tmp_path_factory.mktemp("pictured"), {}
    for layout in LAYOUTS:
        folder = made[layout] = root / layout
        shutil.copytree(folder_of("mistral3"), folder)
        (folder / "tekken.json").write_text(json.dumps(tekken("v13")))
        if layout == "alone":
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                (folder / name).unlink()
    return made


def all_cases() -> list[Case]:
    return [*cases(), *(one for one in own_fields("qwen2_vl") if "image" not in one.name)]


def pictured_cases() -> list[Case]:
    return [*corpus("mistral3"), *own_fields("mistral3")]


@pytest.fixture(scope="module")
def sglangs(sglang_env: Path, folders: dict[str, Path], pictured_folders: dict[str, Path]) -> dict[Path, Any]:
    asked = [Rendering(folder, all_cases(), text_only=True) for folder in folders.values()]
    asked += [Rendering(folder, pictured_cases()) for folder in pictured_folders.values()]
    return dict(zip((each.folder for each in asked), rendered(sglang_env, asked), strict=True))


def predicted_on(env: Path, bodies: Sequence[dict[str, Any]]) -> list[bool]:
    """Return of which requests a router predicts the prompt on an environment's release."""
    release = env_version(env)
    none = is_before(SglangMistralPrompter.first_release, release)
    return [not (none or SGLANG.other_prompt(release, body)) for body in bodies]


@pytest.mark.adopts(engine="sglang", check="prompts of Mistral's tokenizers")
@pytest.mark.parametrize("version", VERSIONS)
def test_sglangs_prompts_by_mistrals_tokenizer_are_the_predicted_ones(
    version: str, sglang_env: Path, folders: dict[str, Path], sglangs: dict[Path, Any], record: Record, figure: Figure
) -> None:
    folder = folders[version]
    prompter = load_text_prompter("sglang", folder)
    assert isinstance(prompter, SglangMistralPrompter)
    kept = predicted_on(sglang_env, [one.body for one in all_cases()])
    chats = [*compress(all_cases(), kept)]
    theirs = [answer.get("ids") or answer for answer in compress(sglangs[folder], kept)]
    wrong = differences(prompter, chats, theirs, REFUSED_BEFORE)
    figure("conversations", len(chats))
    figure("by affinity", len(kept) - len(chats))
    figure("mismatches", len(wrong))
    record(f"Mistral's tokenizer {version}, sglang: conversations, mismatches", [len(chats), len(wrong)])
    assert "\n".join(wrong) == ""


@pytest.mark.adopts(engine="sglang", check="images in Mistral's format")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sglangs_prompts_beside_images_are_the_predicted_ones(
    layout: str,
    sglang_env: Path,
    pictured_folders: dict[str, Path],
    sglangs: dict[Path, Any],
    record: Record,
    figure: Figure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = pictured_folders[layout]
    prompter = load_text_prompter("sglang", folder)
    assert isinstance(prompter, SglangMistralPrompter)
    kept = predicted_on(sglang_env, [one.body for one in pictured_cases()])
    with monkeypatch.context() as patch:
        patch.setattr(SglangPixtral, "expand_ids", lambda family, ids, *_: Expanded(ids, ()))
        equal, refused, different = compared(
            prompter, compress(pictured_cases(), kept), compress(sglangs[folder], kept)
        )
    figure("conversations", equal)
    figure("refused by both", refused)
    figure("by affinity", kept.count(False))
    figure("mismatches", len(different))
    record(f"Mistral's tokenizer {layout}, images, sglang: equal, refused", [equal, refused])
    assert "\n".join(different) == ""
    assert equal + kept.count(False) > 0.7 * len(kept)


def chats_with_images() -> list[tuple[Case, list[str]]]:
    """Return chats with drawn images between texts, and the images as URIs."""
    made = []
    for number, (text, urls) in enumerate(drawn_images("[IMG]")):
        first, *texts = text.split("[IMG]")
        parts = [part for url, after in zip(urls, texts, strict=True) for part in (shown(url), after)]
        made.append((case(f"images {number}", said("system", STORY[:90]), user(first, *parts)), urls))
    return made


def shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def measured(family: Family, urls: Sequence[str]) -> list[PromptImage]:
    images = []
    for data in map(decode, urls):
        size = probe(data, max_pixels=MAX_PIXELS, exif=family.rotates_exif)
        count = family.count(size.width, size.height)
        images.append(PromptImage(hashlib.sha256(data).digest(), count, (size.width, size.height)))
    return images


@pytest.mark.adopts(engine="sglang", check="places of images in Mistral's format")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_and_places_of_images_beside_mistrals_tokenizer_are_the_engines_own(
    layout: str, sglang_env: Path, pictured_folders: dict[str, Path], record: Record, figure: Figure
) -> None:
    folder, every = pictured_folders[layout], chats_with_images()
    prompter = load_text_prompter("sglang", folder)
    chats = [*compress(every, predicted_on(sglang_env, [one.body for one, _ in every]))]
    (written,) = rendered(sglang_env, [Rendering(folder, [one for one, _ in chats])])
    texts = [prompter.decode(answer["ids"]) for answer in written]
    prompts = [*zip(texts, (urls for _, urls in chats), strict=True)]
    program = Path(__file__).with_name("own_images.py")
    (answer,) = answer_of(sglang_env, [program], {"cache": 0, "asked": [{"folder": str(folder), "prompts": prompts}]})
    for (one, urls), theirs in zip(chats, answer["answers"], strict=True):
        mine = prompter.prompt(one.body, measured(prompter.family, urls))
        assert theirs.get("ids") == mine.ids.tolist(), theirs.get("refused")
        places = [(start, start + span.run - 1) for span in mine.spans for start in span.starts]
        assert [(first, last) for first, last, _ in theirs["images"]] == places
    figure("prompts", len(chats))
    figure("by affinity", len(every) - len(chats))
    record(f"Mistral's tokenizer {layout}, sglang: prompts with images", len(chats))


@pytest.mark.adopts(engine="sglang", check="responses by Mistral's tokenizers")
def test_prompts_of_responses_by_mistrals_tokenizer_are_the_engines_own(
    sglang_env: Path, folders: dict[str, Path], record: Record, figure: Figure
) -> None:
    folder, every = folders[VERSIONS[-1]], drawn_requests()
    bodies = [*compress(every, predicted_on(sglang_env, every))]
    asked = {"folder": str(folder), "template": None, "text_only": True, "bodies": bodies}
    (theirs,) = own_prompts(sglang_env, [asked])
    prompter = load_text_prompter("sglang", folder)
    mine = [predicted(prompter, body) for body in bodies]
    equal = 0
    for body, ours, own in zip(bodies, mine, theirs, strict=True):
        if isinstance(ours, dict):
            assert ours == own, json.dumps(body)[:2000]
            equal += 1
        else:
            assert "ids" not in own or own["images"], f"refused here alone: {ours}"
    figure("equal", equal)
    figure("by affinity", len(every) - len(bodies))
    record("responses, sglang Mistral's tokenizer: equal", equal)
    assert equal + len(every) - len(bodies) > 30


@pytest.mark.adopts(engine="sglang", check="texts by Mistral's tokenizers")
def test_ids_of_texts_by_mistrals_tokenizer_are_the_engines_own(
    sglang_env: Path, folders: dict[str, Path], record: Record, figure: Figure
) -> None:
    texts = [*drawn_texts(), "[IMG]", "a [IMG][IMG_BREAK]\n[IMG_END] b", "[INST][/INST]</s>", "[IMG", ""]
    asked = [{"folder": str(folder), "texts": texts} for folder in folders.values()]
    for folder, theirs in zip(folders.values(), answer_of(sglang_env, [PROGRAM, "sglang"], asked), strict=True):
        ids_of = load_text_prompter("sglang", folder).completion
        mine = [[ids_of(text, add_special_tokens=added).ids.tolist() for added in (False, True)] for text in texts]
        assert [text for text, own, ids in zip(texts, mine, theirs["ids"], strict=True) if own != ids] == []
    figure("texts", len(texts))
    record("texts, sglang Mistral's tokenizers: folders, texts of each", [len(folders), len(texts)])


@pytest.mark.long_form
def test_an_engines_pages_by_mistrals_tokenizer_are_the_predicted_ones(
    sglang_env: Path, folders: dict[str, Path], tmp_path: Path, record: Record
) -> None:
    folder = folders["v13"]
    prompter = load_text_prompter("sglang", folder)
    predictor = TextPredictor(prompter.family, prompter, folder.name, BLOCK_SIZE, kind="sglang")
    own = [one for one in drawn_chats() if one.body.get("tool_choice") in (None, "none")][:60]
    log, name = tmp_path / "engine.log", "sglang Mistral's tokenizer"
    check_blocks(sglang_env, folder, log, predictor, own, record, name)


@pytest.mark.long_form
def test_an_engines_pages_with_images_beside_mistrals_tokenizer_are_the_predicted_ones(
    sglang_env: Path, pictured_folders: dict[str, Path], tmp_path: Path, record: Record
) -> None:
    folder, plain = pictured_folders["beside"], load(folder_of("mistral3"))
    names = named(sglang_env, folder_of("mistral3"), plain, drawn_for(plain))  # by pixels, whatever the tokenizer
    prompter = load_text_prompter("sglang", folder)
    predictor = NamedPredictor(prompter.family, prompter, folder.name, BLOCK_SIZE, names=names)
    line = compare_pages(sglang_env, folder, tmp_path / "engine.log", predictor, drawn_for(predictor))
    record("prediction, sglang Mistral 3 beside tekken.json", line)


@pytest.mark.long_form
def test_a_router_learns_images_beside_mistrals_tokenizer(
    sglang_env: Path, pictured_folders: dict[str, Path], tmp_path: Path
) -> None:
    check_images_are_learned(sglang_env, pictured_folders["alone"], tmp_path)
