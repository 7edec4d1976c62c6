"""Drawn prompts with images: ids, places and names by the library, against SGLang's own image processor.

The engine's side is its own code for the model, without an engine (``own_images.py``), so models that no engine on a
CPU serves are compared too. The tokenizer of Qwen3-VL stands in for that of Qwen3.5.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.conftest import Figure
from conformance.engine_process import env_version
from conformance.own_code import answer_of
from conformance.prediction import decode
from conformance.sglang.test_rendering import folder_of
from conformance.workload import SCRIPTS, STORY, image_part, picture
from long_form import IS_LONG
from PIL import Image

from mmrouter_lib import families
from mmrouter_lib.engines.prompters import PROMPTERS
from mmrouter_lib.engines.sglang.identity import artifact_hash_of
from mmrouter_lib.prompt import PromptImage
from mmrouter_router.sentinels.evidence import plan_fingerprints

FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5") if IS_LONG else ("qwen3_vl",)
DRAWN = 25
CACHES = (0, 64)  # megabytes of processed images


def drawn(placeholder: str) -> list[tuple[str, list[str]]]:
    """Return texts with places for images, and the images as URIs; some image is there twice."""
    source, found = random.Random(1), []
    for number in range(DRAWN):
        sizes = [(source.randint(20, 700), source.randint(20, 700)) for _ in range(source.randint(1, 4))]
        urls = [image_part(picture(*size, seed=number))["image_url"]["url"] for size in sizes]
        urls += urls[:1] * source.randint(0, 1)
        texts = [source.choice(("", "\n", STORY[:80], SCRIPTS[:60], " 12345")) for _ in urls]
        found.append((placeholder.join((*texts, "So?\n")), urls))
    return found


Prompts = Sequence[tuple[str, list[str]]]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return drawn("<|vision_start|><|image_pad|><|vision_end|>")


@pytest.fixture(scope="module")
def engines_answers(sglang_env: Path, prompts: Prompts) -> dict[tuple[str, int], Any]:
    asked = [{"folder": str(folder_of(family)), "prompts": prompts} for family in FAMILIES]
    program, found = Path(__file__).with_name("own_images.py"), {}
    for cache in CACHES:
        answers = answer_of(sglang_env, [program], {"cache": cache, "asked": asked})
        found |= {(family, cache): answer for family, answer in zip(FAMILIES, answers, strict=True)}
    return found


@pytest.mark.adopts(engine="sglang", check="images")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_places_and_names_of_images_are_the_engines_own(
    family: str,
    cache: int,
    sglang_env: Path,
    prompts: Prompts,
    engines_answers: dict[tuple[str, int], Any],
    record: Record,
    figure: Figure,
) -> None:
    folder, answer = folder_of(family), engines_answers[family, cache]
    loaded = families.load_family(folder, None)
    assert loaded is not None
    prompter = PROMPTERS["sglang"].load(folder, family=loaded)
    config = json.loads((folder / "config.json").read_text())
    facts = {"model_type": family, "architectures": json.dumps(config["architectures"])}
    plan = plan_fingerprints(env_version(sglang_env), facts | {"mm_preprocess_cache_size_mb": str(cache)})
    named = 0
    for (text, urls), theirs in zip(prompts, answer["answers"], strict=True):
        data = [decode(url) for url in urls]
        sizes = [Image.open(BytesIO(each)).size for each in data]
        images = [
            PromptImage(hashlib.sha256(each).digest(), loaded.count(*size), size)
            for each, size in zip(data, sizes, strict=True)
        ]
        ours = prompter.expand(text, images)
        assert theirs.get("ids") == ours.ids.tolist(), theirs.get("refused")
        places = [(span.offset, span.end - 1) for span in ours.spans]
        assert [(first, last) for first, last, _ in theirs["images"]] == places
        if plan.candidates:
            digest = plan.candidates[0].digest()
            hashes = [artifact_hash_of(hashlib.sha256(each).hexdigest(), digest, {}) for each in data]
            assert [name for _, _, name in theirs["images"]] == hashes
            named += len(hashes)
    record(f"images without a model, sglang {family}, cache of {cache} MB", f"{len(prompts)} prompts, {named} names")
    figure("prompts", len(prompts))
    figure("names of images", named)
    assert bool(named) == (cache > 0 or family.startswith("qwen3_vl")), plan.why
