"""Images that vLLM scales down together where they do not fit the context, against its own front end: those of Nemotron
Omni. Every image is drawn once, because vLLM keeps what it made of one for later requests.
"""

import random
from pathlib import Path

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.conftest import Figure
from conformance.rendering import own_prompts
from conformance.vllm.test_fields import Router
from conformance.workload import image_part, picture, text_part
from long_form import IS_LONG

from mmrouter_lib.media_identity import to_wire

CONTEXT = 4096
CHATS = 120 if IS_LONG else 12


@pytest.mark.adopts(engine="vllm", check="images in a small context")
@pytest.mark.parametrize("family", ["nemotron_omni"])
def test_images_that_are_predicted_are_not_scaled_down_and_those_that_may_be_are_served_by_affinity(
    family: str, vllm_env: Path, record: Record, figure: Figure
) -> None:
    router = Router(Path(run_tool_or_skip("engines.unknown_families", family)), context=CONTEXT)
    draw = random.Random(20_261_130)
    prepared = []
    for _ in range(CHATS):
        sizes = [(draw.randint(8, 1800), draw.randint(8, 1800)) for _ in range(draw.randint(1, 5))]
        parts = [image_part(picture(*size, seed=draw.getrandbits(32), form="JPEG")) for size in sizes]
        prepared.append(router.prepare({"messages": [{"role": "user", "content": [*parts, text_part("Which?")]}]}))
    asked = {"chats": [router.body(each) for each in prepared], "context": CONTEXT}
    wrong, exact, scaled = list[int](), 0, 0
    answers = own_prompts(vllm_env, {router.folder: asked})[router.folder].listed()
    for number, (ours, answer) in enumerate(zip(prepared, answers, strict=True)):
        counted = [[to_wire(image.identity), image.tokens] for image in ours.images]
        theirs = None if "refused" in answer else [[name, length] for name, _, length in answer["images"]]
        if ours.exactness == "exact":
            exact += 1
            wrong += [number] * (theirs != counted or ours.ids.tolist() != answer["ids"])
        else:
            assert ours.reasons == ("image_sizes:messages",)
            scaled += theirs != counted
    figures = {"prompts": CHATS, "exact": exact, "mismatches": len(wrong), "scaled or refused": scaled}
    record(f"images in a small context {family}", figures)
    for what, count in figures.items():
        figure(what, count)
    assert not wrong
    assert exact > CHATS / 5
    assert scaled
