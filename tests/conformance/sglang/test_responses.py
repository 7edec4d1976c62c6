"""Drawn requests of /v1/responses: the prompt that the router predicts, against SGLang's own for the request.

The engine's side is its own code for the endpoint, without an engine (``own_prompts.py``).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.conftest import Figure
from conformance.engine_process import env_version
from conformance.sglang.test_rendering import COMPARED, TEMPLATES, Kind, compare_texts, folder_of, own_prompts
from conformance.vllm.test_responses import TOOLS, Drawing

from mmrouter_lib import families
from mmrouter_lib.engines.base.release_order import is_before
from mmrouter_lib.engines.prompters import response_chat
from mmrouter_lib.engines.sglang.adapter import other_prompt
from mmrouter_lib.engines.sglang.prompts.prompter import SglangPrompter
from mmrouter_lib.prompt import AnyPrompter, PromptImage
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import ChatRequest, Limits, parse_responses

DRAWN = 250
LEAST = 80  # requests that both sides render
KINDS: list[Kind] = [*((family, None) for family in COMPARED), ("qwen3_vl", "everything"), ("qwen3_vl", "texts")]
LATER_EFFORTS = [{"effort": "ultra"}]
"""What SGLang takes since 0.5.23; the router forwards it to an earlier one, which refuses it."""
ANSWER = {"role": "assistant", "content": "A lamp."}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"q": 1.50}'}
PICTURE = {"type": "input_image", "image_url": "data:,"}
ASKED = {"role": "user", "content": "What is it?"}
SPECIAL: list[dict[str, Any]] = [
    {"input": [ASKED, ANSWER, {**CALL, "arguments": {"q": 1}}]},
    {"input": [ASKED, ANSWER, ANSWER, {"role": "assistant", "content": [{"type": "output_text", "text": "B"}]}, CALL]},
    {"input": [ASKED, CALL, {"type": "function_call_output", "call_id": "c1"}, ANSWER, ASKED]},
    {"input": [{"role": "developer", "content": [PICTURE, {"type": "input_text", "text": "Be brief."}]}, ASKED]},
    {"input": [{"role": "developer", "content": [PICTURE]}, ASKED], "instructions": "First."},
    {"input": [ASKED, {"role": "system", "content": ""}]},
    {"input": [ASKED, ANSWER, {**ASKED, "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    *({"input": "x", "reasoning": given} for given in ({}, {"effort": None}, {"effort": "none"}, {"effort": "ultra"})),
    {"input": "x", "reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True, "colour": 1}},
    *(
        {"input": "x", "tools": [*TOOLS, {"type": "web_search"}], "tool_choice": choice}
        for choice in ("none", "required", {"type": "function", "name": "wait"}, {"type": "web_search"})
    ),
    {"input": "x", "tools": [{"type": "web_search"}]},
]


def parsed(prompter: AnyPrompter, body: dict[str, Any]) -> ChatRequest:
    made = response_chat("sglang", prompter)
    request = parse_responses(json.dumps(body).encode(), Limits(), "demo", "sglang", chat_of=made)
    assert request.as_chat is not None, request.inexact
    return request


def predicted(prompter: AnyPrompter, body: dict[str, Any]) -> Any:
    """Return the ids and the number of images, or why there are none."""
    try:
        request = parsed(prompter, body)
        places = [part.place for part in request.media if part.place is not None]
        assert request.as_chat is not None
        images = [PromptImage(number.to_bytes(32, "big"), 1) for number, _ in enumerate(places)]
        return {"ids": prompter.prompt(request.as_chat, images).ids.tolist(), "images": len(images)}
    except (RequestError, ValueError) as error:
        return str(error)


def drawn_requests() -> list[dict[str, Any]]:
    return [{"model": "demo", **body} for body in (*Drawing(1).requests(DRAWN), *SPECIAL)]


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    return drawn_requests()


@pytest.fixture(scope="module")
def engines_prompts(
    sglang_env: Path, bodies: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[Kind, list[dict[str, Any]]]:
    root, asked = tmp_path_factory.mktemp("templates"), []
    for family, template in KINDS:
        if template is not None:
            (root / f"{template}.jinja").write_text(TEMPLATES[template])
        file = None if template is None else str(root / f"{template}.jinja")
        folder = str(folder_of(family))
        asked.append({"folder": folder, "template": file, "text_only": False, "bodies": bodies})
    return dict(zip(KINDS, own_prompts(sglang_env, asked), strict=True))


@pytest.mark.adopts(engine="sglang", check="prompts of /v1/responses")
@pytest.mark.parametrize(("family", "template"), KINDS)
def test_the_prompt_of_a_responses_request_is_the_engines_own(
    family: str,
    template: str | None,
    sglang_env: Path,
    bodies: list[dict[str, Any]],
    engines_prompts: dict[Kind, list[dict[str, Any]]],
    record: Record,
    figure: Figure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = folder_of(family)
    loaded = families.load_family(folder, None)
    assert loaded is not None
    source = None if template is None else TEMPLATES[template]
    prompter = SglangPrompter.load(folder, family=loaded, chat_template=source)
    compare_texts(family, prompter.family, monkeypatch)
    both = images = by_affinity = refused = 0
    for body, own in zip(bodies, engines_prompts[family, template], strict=True):
        if other_prompt(env_version(sglang_env), body):
            by_affinity += 1
            continue
        ours = predicted(prompter, body)
        shown = json.dumps(body)[:2000]
        if isinstance(ours, dict) and "ids" not in own:
            later = is_before((0, 5, 23), env_version(sglang_env)) and body.get("reasoning") in LATER_EFFORTS
            assert later, f"refused by the engine alone: {own}\n{shown}"
            refused += 1
        elif isinstance(ours, dict):
            assert (prompter.tokenizer.decode(ours["ids"]), ours) == (prompter.tokenizer.decode(own["ids"]), own), shown
            both, images = both + 1, images + ours["images"]
        else:
            # The engine drops images for which the template has no place; the router predicts no such prompt.
            dropped = template == "texts" and ours == "the chat template has no place for images"
            assert "ids" not in own or dropped, f"refused here alone: {ours}\n{shown}"
    figure("equal", both)
    figure("by affinity", by_affinity)
    figure("refused by the engine", refused)
    record(f"responses, sglang {family} {template or 'own template'}", f"{both} equal, {images} images")
    assert both + by_affinity >= LEAST
    assert images + by_affinity >= LEAST or template == "texts"
