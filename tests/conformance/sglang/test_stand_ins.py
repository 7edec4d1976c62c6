"""A real SGLang with models whose images it names by their pixels: every published page is the predicted one.

The engine's own image processor names the images beforehand (``own_images.py``); a router learns these names. The
tokenizer of Qwen3-VL stands in for those of GLM-4.1V, InternVL and PaddleOCR-VL. Part of the long form.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.engine_process import BLOCK_SIZE, engine, require_memory
from conformance.engines import deployed, send, sglang_manifest, wait_until_published
from conformance.own_code import answer_of
from conformance.prediction import MAX_PIXELS, Predicted, Predictor, decode, image_places
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
from local.rig import Deployment
from waiting import wait_for

from mmrouter_lib.engines.sglang.identity import sentinels
from mmrouter_lib.families import Family
from mmrouter_lib.image_size import probe
from mmrouter_lib.prompt import PromptImage
from mmrouter_router.sentinels.table import fill_sentinels

pytestmark = pytest.mark.long_form
OPTIONS = {"internvl_chat": ("--context-length=32768", "--max-total-tokens=524288")}
"""Family whose images are thousands of tokens -> room for six of them in a request, and for all requests."""
PROVE_SECONDS = 60.0
OWN_IMAGES = Path(__file__).with_name("own_images.py")


Name = tuple[bytes, tuple[int, int] | None]
"""An image, and the size that the engine pads it to beside others."""


@dataclass(frozen=True)
class NamedPredictor(SglangPredictor):
    """``names``: the hash that the engine gives an image."""

    names: Mapping[Name, int] = field(default_factory=dict)

    def predict(self, case: Case) -> Predicted:
        plain = Predictor.predict(self, case)
        names = names_of(self.family, [url for _, _, url in image_places(case)])
        names = names[::-1] if self.swapped else names
        numbered = [replace(span, identity=bytes([number])) for number, span in enumerate(plain.spans)]
        filled = fill_sentinels(
            plain.ids, numbered, lambda number: sentinels(self.names[names[number[0]]], legacy=self.legacy)
        )
        return replace(plain, filled=filled.ids)


def sizes_of(family: Family, urls: Sequence[str]) -> list[tuple[int, int]]:
    probed = [probe(decode(url), max_pixels=MAX_PIXELS, exif=family.rotates_exif) for url in urls]
    return [(size.width, size.height) for size in probed]


def names_of(family: Family, urls: Sequence[str]) -> list[Name]:
    paddings = family.paddings(sizes_of(family, urls)) if urls else ()
    return [(decode(url), padding) for url, padding in zip(urls, paddings, strict=True)]


def named(env: Path, folder: Path, loaded: SglangPredictor, cases: Iterable[Case]) -> dict[Name, int]:
    family, found = loaded.family, dict[Name, int]()
    every = {tuple(url for _, _, url in image_places(one)) for one in cases} - {()}
    prompts = [(" ".join([family.media_text["image"]] * len(urls)), urls) for urls in every]
    asked = [{"folder": str(folder), "prompts": prompts}]
    (answer,) = answer_of(env, [OWN_IMAGES], {"cache": 0, "asked": asked})
    for (text, urls), theirs in zip(prompts, answer["answers"], strict=True):
        images = [PromptImage(bytes(32), family.count(*size), size) for size in sizes_of(family, urls)]
        at = {first: name for first, _, name in theirs["images"]}
        starts = [span.offset for span in loaded.prompter.expand(text, images, add_special_tokens=False).spans]
        found |= {name: at[start] for name, start in zip(names_of(family, urls), starts, strict=True)}
    return found


def load(folder: Path) -> SglangPredictor:
    return SglangPredictor.load(folder, BLOCK_SIZE, "sglang")


def drawn_for(loaded: SglangPredictor) -> list[Case]:
    drawn = (*texts(), *sizes(), *formats(), *positions(), *several(), *salted())
    return [*predicted_of(loaded, drawn), LAST]


def compare_pages(
    env: Path, folder: Path, log: Path, predictor: NamedPredictor, cases: Sequence[Case], *options: str
) -> str:
    """Compare every page that an engine publishes, and return the report's line."""
    with engine(env, folder, log, *options, kind="sglang") as served:
        done = recorded("sglang", served, predictor, [ask(served, predictor, one) for one in cases], ())
    report = done.compared()
    assert report.mismatches == []
    assert report.matched > 100
    assert any(text.startswith("two images: ") for text in done.compared(swapped=True).mismatches)
    return report.line


def check_images_are_learned(env: Path, folder: Path, root: Path, *options: str) -> None:
    """Pages of 64 tokens hold all that InternVL has before its first image. Mistral 3's images are rows."""
    require_memory()
    made = sglang_manifest(folder, folder.name, [("worker", 1)], *options, blockSize=64)
    alike = [image_part(picture(120, 60, seed=seed)) for seed in (1, 2)]
    unlike = [image_part(picture(*size, seed=3)) for size in ((100, 300), (260, 70), (40, 40))]
    with deployed(env, root, made) as deployment:
        wait_for(deployment.settled, PROVE_SECONDS, "a verified engine")
        for name, pictures in {"two images": alike, "of other sizes": unlike}.items():
            check_hit(deployment, case(name, user(*pictures, "What are they?")))


def check_hit(deployment: Deployment, shown: Case) -> None:
    """Repeat a request until its images are known: one more then hits all its blocks."""
    wait_for(lambda: send(deployment, shown).exactness == "exact", PROVE_SECONDS, "the images are known")
    wait_until_published(deployment, send(deployment, shown))
    again = send(deployment, shown)
    assert (again.exactness, again.overlap, again.promised) == ("exact", again.blocks, again.cached)


@pytest.mark.parametrize("family", ["gemma3", "glm4v", "internvl_chat", "mistral3", "paddleocr_vl"])
def test_every_published_page_is_the_predicted_one(
    family: str, sglang_env: Path, tmp_path: Path, record: Record
) -> None:
    folder = Path(run_tool_or_skip("engines.unknown_families", family))
    loaded = load(folder)
    cases = drawn_for(loaded)
    names = named(sglang_env, folder, loaded, cases)
    predictor = NamedPredictor(loaded.family, loaded.prompter, folder.name, BLOCK_SIZE, names=names)
    options = OPTIONS.get(family, ())
    line = compare_pages(sglang_env, folder, tmp_path / "engine.log", predictor, cases, *options)
    record(f"prediction, sglang {family}", line)


@pytest.mark.parametrize("family", ["internvl_chat", "mistral3"])
def test_a_router_learns_images_before_all_texts_and_images_in_rows(
    family: str, sglang_env: Path, tmp_path: Path
) -> None:
    folder = Path(run_tool_or_skip("engines.unknown_families", family))
    check_images_are_learned(sglang_env, folder, tmp_path, *OPTIONS.get(family, ()))
