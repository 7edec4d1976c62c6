"""Drawn processor options of requests through the router's stages and vLLM's own front end, without an engine.

vLLM names an image under options by a hash. The router predicts that name, the image's tokens and every block's keys.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.conftest import Figure, Shrunk, model_folder
from conformance.rendering import own_prompts
from conformance.setups import REPOSITORIES
from conformance.vllm.test_fields import Router
from conformance.workload import image_part, picture, text_part
from long_form import IS_LONG, parameters

from mmrouter_lib.block_keys import block_extras, span_extra
from mmrouter_lib.engines.vllm.item_names import TRUST
from mmrouter_lib.media_identity import foreign_identity, from_wire

CHATS = 100 if IS_LONG else 20
BLOCK_SIZE = 16
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "phi3_v")
LIMITED = "qwen3_vl, limits of the resource"
CASES = (*FAMILIES, LIMITED)
ALWAYS = ("qwen3_vl",)
PROCESSOR = {"minPixels": 50_176, "maxPixels": 200_704}


def options(draw: random.Random, case: str) -> dict[str, int]:
    if case == "phi3_v":
        return {"num_crops": draw.randint(1, 16)}
    least = draw.choice((1, 3136, 65_536, draw.randint(1, 300_000)))
    chosen = {"min_pixels": least, "max_pixels": least + draw.choice((0, 1, 1024, draw.randint(0, 2_000_000)))}
    if draw.random() < 0.4:
        name = draw.choice(list(chosen))
        return {name: draw.randint(65_536, 200_704)}  # within the published limits and those of the resource
    return dict(draw.sample(list(chosen.items()), 2))


def drawn(case: str) -> list[dict[str, Any]]:
    draw = random.Random(case)
    shapes = [(draw.randint(28, 1200), draw.randint(28, 1200)) for _ in range(8)]
    pictures = [image_part(picture(*shape, seed=number)) for number, shape in enumerate(shapes)]
    fields = []
    for _ in range(CHATS):
        parts = [text_part("Look: " * draw.randint(1, 9))]
        for one in draw.choices(pictures, k=draw.randint(1, 3)):
            parts += [one, text_part("and then? " * draw.randint(0, 9))]
        asked = options(draw, case) if draw.random() < 0.9 else {}
        fields.append({"messages": [{"role": "user", "content": parts}], "mm_processor_kwargs": asked})
    return fields


@pytest.fixture(scope="module")
def router_of(shrunk: Shrunk) -> Any:
    def of(case: str) -> Router:
        family = case.partition(",")[0]
        if family == "phi3_v":
            folder = shrunk(REPOSITORIES[family])
        elif family == "qwen3_5":
            folder = Path(run_tool_or_skip("engines.unknown_families", family))
        else:
            folder = model_folder(REPOSITORIES[family].replace("/", "--"))
        return Router(folder, PROCESSOR if case == LIMITED else {}, args=(TRUST,))

    return of


def in_events(name: str) -> bytes:
    return from_wire(name) or foreign_identity(name)


def answers(env: Path, router: Router, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    limits = {"min_pixels": PROCESSOR["minPixels"], "max_pixels": PROCESSOR["maxPixels"]} if router.processor else {}
    asked: Mapping[str, Any] = {
        "chats": bodies,
        "context": 32_768,
        "block_size": BLOCK_SIZE,
        "trusted": str(router.folder).lstrip("/"),
        "processor": limits,
    }
    return own_prompts(env, {router.folder: asked})[router.folder].listed()


@pytest.mark.adopts(engine="vllm", check="options of requests")
@pytest.mark.parametrize("case", parameters(CASES, *ALWAYS))
def test_images_under_options_have_the_tokens_names_and_keys_that_vllms_own_front_end_gives_them(
    case: str, vllm_env: Path, router_of: Any, record: Record, figure: Figure
) -> None:
    router, chats = router_of(case), drawn(case)
    prepared = [router.prepare(chat) for chat in chats]
    assert {(each.exactness, each.reasons) for each in prepared} == {("exact", ())}
    wrong, named = list[str](), 0
    found = answers(vllm_env, router, [router.body(each) for each in prepared])
    for chat, ours, theirs in zip(chats, prepared, found, strict=True):
        blocks = len(ours.ids) // BLOCK_SIZE
        extras = block_extras(ours.spans, BLOCK_SIZE, blocks)
        keys = [b"".join(span_extra(in_events(name), at) for name, at in block) for block in theirs.get("keys", ())]
        places = [(in_events(name), offset, length) for name, offset, length in theirs.get("images", ())]
        named += sum(from_wire(name) is None for name, _, _ in theirs.get("images", ()))
        if (
            theirs.get("ids") != ours.ids.tolist()
            or places != [(span.identity, span.offset, span.length) for span in ours.spans]
            or keys != [extras.get(number, b"") for number in range(blocks)]
        ):
            wrong.append(f"{chat['mm_processor_kwargs']}: {theirs.get('refused', '')}")
    figures = {"prompts": len(chats), "images named by a hash": named, "mismatches": len(wrong)}
    record(f"options of requests, {case}", figures)
    for what, count in figures.items():
        figure(what, count)
    assert not wrong, wrong[:10]
    assert named > CHATS / 2
