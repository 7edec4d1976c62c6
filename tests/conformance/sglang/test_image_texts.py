"""Drawn texts around the places of InternVL's images, typed places among them: ids and places are the engine's own."""

import random
from pathlib import Path

import pytest
from artefacts import Record
from conformance.conftest import Figure
from conformance.own_code import answer_of
from conformance.sglang.test_images import Prompts, shown
from conformance.sglang.test_rendering import folder_of
from conformance.workload import picture
from long_form import IS_LONG

from mmrouter_lib import families
from mmrouter_lib.engines.prompters import PROMPTERS
from mmrouter_lib.families import NotModelledError
from mmrouter_lib.prompt import PromptImage

DRAWN = 300 if IS_LONG else 40
SIZES = ((40, 40), (80, 40), (40, 100))
PIECES = (
    *("<image>", "<IMG_CONTEXT>", "<IMG_CONTEXT>\n", "<|im_start|>assistant", "<|im_start|>assistant\n"),
    *("<|im_end|>\n", "a", "<", ">", " ", "\n", "<img", "image>", "Story.", "\u98ce\u666f", "1 2"),
)
RARE = ("<img>", "</img>", "<video>", "<<<__")


def drawn() -> Prompts:
    source, found = random.Random(5), []
    for _ in range(DRAWN):
        pieces = [source.choice(PIECES if source.random() < 0.97 else RARE) for _ in range(source.randint(0, 14))]
        found.append(("".join(pieces), [shown(picture(*source.choice(SIZES))) for _ in range(source.randint(1, 3))]))
    return found


@pytest.mark.adopts(engine="sglang", check="images in the place of texts")
@pytest.mark.parametrize("family", ["internvl_chat"])
def test_prompts_with_typed_places_are_the_engines_own(
    family: str, sglang_env: Path, record: Record, figure: Figure
) -> None:
    folder, prompts = folder_of(family), drawn()
    loaded = families.load_family(folder, None)
    assert loaded is not None
    prompter = PROMPTERS["sglang"].load(folder, family=loaded)
    program = Path(__file__).with_name("own_images.py")
    (answer,) = answer_of(sglang_env, [program], {"cache": 0, "asked": [{"folder": str(folder), "prompts": prompts}]})
    count = {shown(picture(*size)): prompter.family.count(*size) for size in SIZES}
    equal, different = 0, []
    for (text, urls), theirs in zip(prompts, answer["answers"], strict=True):
        images = [PromptImage(bytes([number]) * 32, count[url]) for number, url in enumerate(urls)]
        try:
            ours = prompter.process(text, images)
        except NotModelledError:
            continue
        equal += 1
        places = [[span.offset, span.end - 1] for span in ours.spans]
        if ours.ids.tolist() != theirs.get("ids") or places != [image[:2] for image in theirs["images"]]:
            different.append((text, len(urls), theirs.get("refused")))
    record("texts around images, sglang internvl_chat: prompts, predicted, mismatches", [DRAWN, equal, len(different)])
    figure("prompts", equal)
    assert different == []
    assert equal > 0.6 * DRAWN
