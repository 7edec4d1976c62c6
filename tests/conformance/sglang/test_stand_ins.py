"""A real SGLang with models whose images it names by their pixels: every published page is the predicted one.

The engine's own image processor names the images beforehand (``own_images.py``); a router learns these names. The
tokenizer of Qwen3-VL stands in for those of GLM-4.1V, InternVL and PaddleOCR-VL. Part of the long form.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.engine_process import BLOCK_SIZE, engine, require_memory
from conformance.engines import deployed, send, sglang_manifest, wait_until_published
from conformance.own_code import answer_of
from conformance.prediction import decode, image_places
from conformance.scenarios import recorded
from conformance.sglang.test_prediction import LAST, SglangPredictor, ask, predicted_of
from conformance.workload import (
    Case,
    case,
    formats,
    image_part,
    picture,
    positions,
    salted,
    several,
    sizes,
    texts,
    user,
)
from waiting import wait_for

pytestmark = pytest.mark.long_form
OPTIONS = {"internvl_chat": ("--context-length=32768", "--max-total-tokens=524288")}
"""Family whose images are thousands of tokens -> room for six of them in a request, and for all requests."""
PROVE_SECONDS = 60.0
OWN_IMAGES = Path(__file__).with_name("own_images.py")


@dataclass(frozen=True)
class NamedPredictor(SglangPredictor):
    """``names``: an image -> the hash that the engine gives it."""

    names: Mapping[bytes, int] = field(default_factory=dict)

    def item_hash(self, data: bytes) -> int:
        return self.names[data]


def named(env: Path, folder: Path, place: str, cases: Iterable[Case]) -> dict[bytes, int]:
    urls = list(dict.fromkeys(url for one in cases for _, _, url in image_places(one)))
    asked = [{"folder": str(folder), "prompts": [(place, [url]) for url in urls]}]
    (answer,) = answer_of(env, [OWN_IMAGES], {"cache": 0, "asked": asked})
    return {decode(url): made["images"][0][2] for url, made in zip(urls, answer["answers"], strict=True)}


@pytest.mark.parametrize("family", ["gemma3", "glm4v", "internvl_chat", "paddleocr_vl"])
def test_every_published_page_is_the_predicted_one(
    family: str, sglang_env: Path, tmp_path: Path, record: Record
) -> None:
    folder = Path(run_tool_or_skip("engines.unknown_families", family))
    loaded = SglangPredictor.load(folder, BLOCK_SIZE, "sglang")
    drawn = (*texts(), *sizes(), *formats(), *positions(), *several(), *salted())
    cases = [*predicted_of(loaded, drawn), LAST]
    names = named(sglang_env, folder, loaded.family.media_text["image"], cases)
    predictor = NamedPredictor(loaded.family, loaded.prompter, folder.name, BLOCK_SIZE, names=names)
    with engine(sglang_env, folder, tmp_path / "engine.log", *OPTIONS.get(family, ()), kind="sglang") as served:
        done = recorded("sglang", served, predictor, [ask(served, predictor, one) for one in cases], ())
    report = done.compared()
    record(f"prediction, sglang {family}", report.line)
    assert report.mismatches == []
    assert report.matched > 100
    assert any(text.startswith("two images: ") for text in done.compared(swapped=True).mismatches)


@pytest.mark.parametrize("family", ["internvl_chat"])
def test_a_router_learns_images_that_stand_before_the_texts_of_their_message(
    family: str, sglang_env: Path, tmp_path: Path
) -> None:
    """Pages of 64 tokens hold all that is before the first image of a short chat."""
    require_memory()
    folder = Path(run_tool_or_skip("engines.unknown_families", family))
    made = sglang_manifest(folder, folder.name, [("worker", 1)], *OPTIONS[family], blockSize=64)
    shown = case("an image", user(image_part(picture(120, 60, seed=1)), "What is it?"))
    with deployed(sglang_env, tmp_path, made) as deployment:
        wait_for(deployment.settled, PROVE_SECONDS, "a verified engine")
        wait_for(lambda: send(deployment, shown).exactness == "exact", PROVE_SECONDS, "the image is known")
        wait_until_published(deployment, send(deployment, shown))
        again = send(deployment, shown)
    assert (again.exactness, again.overlap, again.promised) == ("exact", again.blocks, again.cached)
