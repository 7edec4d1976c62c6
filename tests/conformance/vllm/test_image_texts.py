"""Drawn chats of InternVL as its authors publish it, whose images take the place of a text: ids, and the place and name
of every image, by vLLM's own front end. The tokens of that text depend on what stands beside it.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.conftest import Figure
from conformance.rendering import own_prompts
from conformance.vllm.test_fields import Router
from conformance.workload import image_part, picture, text_part
from long_form import IS_LONG

from mmrouter_lib.media_identity import to_wire
from mmrouter_router.core.errors import RequestError
from mmrouter_router.request.prepared import Prepared

CHATS = 400 if IS_LONG else 60
BESIDE = (
    "What?",
    " what",
    "\nWhat?",
    "7",
    "",
    " ",
    ">",
    "<",
    "=",
    "\u0338",
    "e\u0301",
    "東京",
    "<img>",
    "</img>",
    "image>",
)
TYPED = ("<image>", "<image>\n", "< image>", "<IMG_CONTEXT>", "<|im_end|>", "<video>")


def drawn(draw: random.Random) -> dict[str, Any]:
    pictures = [image_part(picture(*size, seed=at)) for at, size in enumerate(((64, 48), (500, 200), (40, 900)))]

    def part() -> dict[str, Any]:
        kind = draw.random()
        if kind < 0.45:
            return draw.choice(pictures)
        return text_part(draw.choice(TYPED if kind < 0.52 else BESIDE))

    messages: list[dict[str, Any]] = []
    for role in ("user", "assistant", "user")[: draw.choice((1, 3))]:
        parts = [part() for _ in range(draw.randint(1, 5))] if role == "user" else [text_part(draw.choice(BESIDE))]
        messages.append({"role": role, "content": parts})
    return {"messages": messages}


@pytest.mark.adopts(engine="vllm", check="images in the place of texts")
@pytest.mark.parametrize("family", ["internvl_chat"])
def test_prompts_whose_images_take_the_place_of_a_text_are_those_of_vllms_own_front_end(
    family: str, vllm_env: Path, record: Record, figure: Figure
) -> None:
    router = Router(Path(run_tool_or_skip("engines.unknown_families", family)))
    draw, prepared, refused = random.Random(20_261_130), list[Prepared](), list[dict[str, Any]]()
    for chat in [drawn(draw) for _ in range(CHATS)]:
        try:
            prepared.append(router.prepare(chat))
        except RequestError:
            refused.append({**router.client_body(chat), "model": router.folder.name})
    asked = {"chats": [*map(router.body, prepared), *refused], "context": 32_768}
    answers = own_prompts(vllm_env, {router.folder: asked})[router.folder].listed()
    wrong, exact = list[str](), 0
    for number, (ours, answer) in enumerate(zip(prepared, answers, strict=False)):
        if ours.exactness != "exact":
            assert ours.reasons == ("not_modelled:messages",)
            continue
        exact += 1
        names = {image.identity: to_wire(image.identity) for image in ours.images}
        places = [[names[span.identity], span.offset, span.length] for span in ours.spans]
        theirs = answer if isinstance(answer, dict) else {"ids": answer, "images": []}
        if (ours.ids.tolist(), places) != (theirs.get("ids"), theirs.get("images")):
            wrong.append(f"{number}: {theirs.get('refused')}")
    taken = [answer for answer in answers[len(prepared) :] if "refused" not in answer]
    figures = {"prompts": exact, "refused": len(refused), "mismatches": len(wrong)}
    record(f"images in the place of texts {family}", figures)
    for what, count in figures.items():
        figure(what, count)
    assert (wrong, taken) == ([], [])
    assert exact > CHATS / 2
