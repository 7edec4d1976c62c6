"""Drawn prompts with images: ids, places and names by the library, against SGLang's own image processor.

The engine's side is its own code for the model, without an engine (``own_images.py``), so models that no engine on a
CPU serves are compared too. The tokenizer of Qwen3-VL stands in for those of Qwen3.5, Gemma 4, GLM-4.1V and
PaddleOCR-VL.
"""

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.conftest import Figure
from conformance.engine_process import env_version
from conformance.own_code import answer_of
from conformance.prediction import MAX_PIXELS, decode
from conformance.sglang.test_rendering import folder_of
from conformance.workload import SCRIPTS, STORY, image_part, picture
from long_form import IS_LONG

from mmrouter_lib import families
from mmrouter_lib.engines.prompters import PROMPTERS
from mmrouter_lib.engines.sglang.identity import artifact_hash_of
from mmrouter_lib.families.kimi_k25 import KimiK25
from mmrouter_lib.image_size import probe
from mmrouter_lib.prompt import PromptImage
from mmrouter_router.sentinels.evidence import plan_fingerprints

BY_BYTES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "paddleocr_vl") if IS_LONG else ("qwen3_vl",)
"""Families whose images the engine names by their bytes, some of them with a cache alone."""
MORE = ("gemma4", "glm4v", "internvl_chat", "kimi_k25", "mistral3", "qwen3_omni_moe")
LEARNED = ("gemma3", *(MORE if IS_LONG else ()))
"""Families whose images it names by their pixels, or Kimi by bytes and grid: the router learns the names."""
FAMILIES = (*BY_BYTES, *LEARNED)
DRAWN = 25
CACHES = (0, 64)  # megabytes of processed images
WITHOUT_CACHE = {"qwen3_omni_moe"}
"""Families whose images the engine refuses where it has such a cache (``KeyError: 'audio_token_id'``)."""
NOT_NAMED = {"0.5.19", "0.5.20", "0.5.21"}
"""Releases for which the router computes no names: it learns all of them."""
LARGE = (3000, 2100)  # above what these families take without scaling an image down
BEGIN = {"gemma3": "<bos>", "mistral3": "<s>"}
"""Family -> the text with which every second prompt begins, as its template does."""
TYPED = {
    "gemma3": ("<start_of_image>",),
    "gemma4": ("<|image|>", "<|video|>", "<|audio|>"),
    "glm4v": ("<|image|>", "<|video|>", "<|begin_of_video|>"),
    "kimi_k25": ("<|media_pad|>",),
    "paddleocr_vl": (),
    "qwen3_omni_moe": ("<image>", "<|audio_pad|>"),
    "qwen3_vl": ("<image>",),
}
"""Family -> texts that the engine refuses before an image. It never answers one with PaddleOCR-VL's placeholder."""
REFUSES_IMAGES_WITHOUT_A_PLACE = {"kimi_k25"}
"""The others drop such images and serve the rest."""
WRITTEN = {"gemma4": "\n\n<|image|>\n\n", "internvl_chat": "<IMG_CONTEXT>\n"}
"""Family -> what a template writes for an image, where that is not what vLLM writes into a text."""
Prompts = Sequence[tuple[str, list[str]]]


def caches(family: str) -> tuple[int, ...]:
    return (0,) if family in WITHOUT_CACHE else CACHES


def drawn(placeholder: str) -> Prompts:
    """Return texts with places for images, and the images as URIs: some image is there twice, some are turned."""
    source, found = random.Random(1), []
    for number in range(DRAWN):
        sizes = [(source.randint(20, 700), source.randint(20, 700)) for _ in range(source.randint(1, 4))]
        urls = [shown(picture(*size, seed=number)) for size in sizes]
        urls += urls[:1] * source.randint(0, 1)
        texts = [source.choice(("", "\n", STORY[:80], SCRIPTS[:60], " 12345")) for _ in urls]
        found.append((placeholder.join((*texts, "So?\n")), urls))
    turned = [shown(picture(480, 90 * side, form="JPEG", turned=side)) for side in range(2, 9)]
    turned.append(shown(picture(290, 1000, form="JPEG", turned=6)))  # InternVL has other tiles for 1000x290
    large = [shown(picture(*LARGE)), urls[0]]
    return [*found, *((placeholder * len(urls), urls) for urls in (turned, large))]


def shown(data: bytes) -> str:
    part: dict[str, Any] = image_part(data)
    return str(part["image_url"]["url"])


def prompts_of(family: str) -> Prompts:
    loaded = families.load_family(folder_of(family), None)
    assert loaded is not None
    prompts, begin = drawn(WRITTEN.get(family, loaded.media_text["image"])), BEGIN.get(family, "")
    return [(begin * (number % 2) + text, urls) for number, (text, urls) in enumerate(prompts)]


@pytest.fixture(scope="module")
def engines_answers(sglang_env: Path) -> dict[tuple[str, int], Any]:
    asked = [{"folder": str(folder_of(family)), "prompts": prompts_of(family)} for family in FAMILIES]
    program, found = Path(__file__).with_name("own_images.py"), {}
    for cache in CACHES:
        answers = answer_of(sglang_env, [program], {"cache": cache, "asked": asked})
        found |= {(family, cache): answer for family, answer in zip(FAMILIES, answers, strict=True)}
    return found


@pytest.mark.adopts(engine="sglang", check="images")
@pytest.mark.parametrize(("family", "cache"), [(family, cache) for family in FAMILIES for cache in caches(family)])
def test_ids_places_and_names_of_images_are_the_engines_own(
    family: str,
    cache: int,
    sglang_env: Path,
    engines_answers: dict[tuple[str, int], Any],
    record: Record,
    figure: Figure,
) -> None:
    folder, answer = folder_of(family), engines_answers[family, cache]
    loaded = families.load_family(folder, None)
    assert loaded is not None
    prompter, prompts = PROMPTERS["sglang"].load(folder, family=loaded), prompts_of(family)
    config = json.loads((folder / "config.json").read_text())
    facts = {"model_type": family, "architectures": json.dumps(config["architectures"])}
    plan = plan_fingerprints(env_version(sglang_env), facts | {"mm_preprocess_cache_size_mb": str(cache)})
    digest = plan.candidates[0].digest() if plan.candidates else None
    names, named = defaultdict[Any, set[int]](set), 0
    for (text, urls), theirs in zip(prompts, answer["answers"], strict=True):
        data = [decode(url) for url in urls]
        probed = [probe(each, max_pixels=MAX_PIXELS, exif=prompter.family.rotates_exif) for each in data]
        sizes = [(size.width, size.height) for size in probed]
        images = [
            PromptImage(hashlib.sha256(each).digest(), prompter.family.count(*size), size)
            for each, size in zip(data, sizes, strict=True)
        ]
        ours = prompter.process(text, images)
        assert theirs.get("ids") == ours.ids.tolist(), theirs.get("refused")
        places = [(start, start + span.run - 1) for span in ours.spans for start in span.starts]
        assert [(first, last) for first, last, _ in theirs["images"]] == places
        at = {first: name for first, _, name in theirs["images"]}
        for each, padding, span in zip(data, prompter.family.paddings(sizes), ours.spans, strict=True):
            (name,) = {at[start] for start in span.starts}
            names[each, padding].add(name)
            if digest is not None:
                assert name == artifact_hash_of(hashlib.sha256(each).hexdigest(), digest, {})
                named += 1
    record(f"images without a model, sglang {family}, cache of {cache} MB", f"{len(prompts)} prompts, {named} names")
    figure("prompts", len(prompts))
    figure("names of images", named)
    by_bytes = family in BY_BYTES and (cache > 0 or family.startswith("qwen3_vl"))
    assert bool(named) == (by_bytes and env_version(sglang_env) not in NOT_NAMED), plan.why
    assert all(len(each) == 1 for each in names.values()), (
        "the engine names an image by more than itself and its padding"
    )
    assert len(set[int]().union(*names.values())) == len(names), "two images have one name"


@pytest.mark.long_form
@pytest.mark.parametrize("family", [family for family in FAMILIES if family in TYPED])
def test_the_engine_refuses_another_place_and_answers_to_an_image_without_one_by_its_family(
    family: str, sglang_env: Path
) -> None:
    (_, (url, *_)), *_ = prompts_of(family)
    loaded = families.load_family(folder_of(family), None)
    assert loaded is not None
    place = WRITTEN.get(family, loaded.media_text["image"])
    asked = [
        *((f"{typed} or {place}", [url]) for typed in TYPED[family]),
        (f"One: {place}", [url, url]),
        ("None.", [url]),
    ]
    program = Path(__file__).with_name("own_images.py")
    (answer,) = answer_of(
        sglang_env, [program], {"cache": 0, "asked": [{"folder": str(folder_of(family)), "prompts": asked}]}
    )
    *failed, fewer, none = ["refused" in each for each in answer["answers"]]
    refuses = family in REFUSES_IMAGES_WITHOUT_A_PLACE
    assert (all(failed), fewer, none) == (True, refuses, refuses), answer["answers"]


COUNTS = """
import json, sys
from sglang.srt.multimodal.processors.kimi_k25 import navit_resize_config
asked = json.load(sys.stdin)
counts = [navit_resize_config(*size, **asked["limits"])["num_tokens"] for size in asked["sizes"]]
print("\\n" + json.dumps(counts))
"""


@pytest.mark.long_form
def test_counts_of_kimi_are_those_of_the_engines_own_formula(sglang_env: Path, record: Record) -> None:
    """The formula of its path for GPUs; on a CPU it calls the folder's code, which is a stand-in here."""
    draw, kimi = random.Random(2), families.load_family(folder_of("kimi_k25"), None)
    assert isinstance(kimi, KimiK25)
    sizes = [tuple(round(2 ** draw.uniform(0, 14)) for _ in range(2)) for _ in range(20_000)]
    limits = {"patch_size": kimi.patch_size, "merge_kernel_size": kimi.merge_size}
    limits |= {"in_patch_limit": kimi.most, "patch_limit_on_one_side": kimi.most_on_a_side}
    theirs = answer_of(sglang_env, ["-c", COUNTS], {"sizes": sizes, "limits": limits})
    wrong = [size for size, count in zip(sizes, theirs, strict=True) if kimi.count(*size) != count]
    record("sglang's counts of kimi_k25: sizes, mismatches", [len(sizes), len(wrong)])
    assert wrong == []
