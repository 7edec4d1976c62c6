"""Drawn requests of Anthropic's API: the prompt of the chat that the router makes, against vLLM's own for the request.

The engine's side is ``/v1/messages/render`` of a real ``vllm launch render``, which converts requests by vLLM's code.
"""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.conftest import Figure, Shrunk
from conformance.engine_process import BLOCK_SIZE, context_length
from conformance.own_code import answer_of
from conformance.prediction import MAX_PIXELS, Predictor, decode
from conformance.rendering import Rendered, renderer
from conformance.setups import REPOSITORIES, setup_families
from conformance.workload import picture

from mmrouter_lib.engines.base.adapter import ImageRewrite
from mmrouter_lib.engines.base.request_fields import MESSAGES, words
from mmrouter_lib.engines.vllm.adapter import VLLM
from mmrouter_lib.image_size import probe
from mmrouter_lib.media_identity import media_identity, to_wire
from mmrouter_lib.prompt import PromptImage
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import ChatRequest, Limits, TemplateTraits, parse_messages
from mmrouter_router.intake.messages import BLOCKS, TOOL_FIELDS

DRAWN, MOST = 150, 900
LEAST = 60  # requests that both sides render; templates refuse some, such as two messages of one role in a row
FLAGS = (
    "--trust-remote-code",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
)  # without them tools are a 400
TOO_LONG = "maximum context length"
TEXTS = (
    "Hello.",
    "Zoë, 東京 👩🏽‍🚀",
    "two\nlines \n",
    "x-anthropic-billing-header: cc_version=1; cch=ab12;",
    "What is this?",
    "",
)
SIZES = ((64, 48), (300, 200), (28, 560))
TOOLS = [
    {"name": "look", "description": "Look it up.", "input_schema": {"type": "object", "properties": {"q": {}}}},
    {"name": "wait", "input_schema": {"properties": {"s": {"type": "number"}}, "required": ["s"]}, "strict": True},
]


class Drawing:
    """Draws requests; ``images``: the bytes of the last one's images, in prompt order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pictures = [picture(*size, seed=number) for number, size in enumerate(SIZES)]

    def request(self, model: str) -> dict[str, Any]:
        chance, pick = self._random.random, self._random.choice
        roles = ["user", "assistant"] * 3
        messages = [self._message(role) for role in roles[: self._random.randint(1, 6)]]
        if chance() < 0.3:
            inline = {"role": "system", "content": pick((pick(TEXTS), [self._text(), self._text()]))}
            messages.insert(self._random.randint(0, len(messages)), inline)
        body: dict[str, Any] = {"model": model, "max_tokens": 16, "messages": messages}
        if chance() < 0.6:
            body["system"] = pick((pick(TEXTS), [self._text() for _ in range(self._random.randint(0, 3))]))
        if chance() < 0.4:
            body["tools"] = TOOLS[: self._random.randint(1, 2)]
            if chance() < 0.5:
                body["tool_choice"] = pick(({"type": "none"}, {"type": "auto", "disable_parallel_tool_use": True}))
        if chance() < 0.3:
            body["thinking"] = pick(({"type": "disabled"}, {"type": "adaptive"}))
        if chance() < 0.2:
            body["output_config"] = {"effort": pick(("low", "high", "max"))}
        return body

    def _text(self) -> dict[str, Any]:
        return {"type": "text", "text": self._random.choice(TEXTS)}

    def _image(self) -> dict[str, Any]:
        data = base64.b64encode(self._random.choice(self._pictures)).decode()
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    def _message(self, role: str) -> dict[str, Any]:
        if self._random.random() < 0.3:
            return {"role": role, "content": self._random.choice(TEXTS)}
        kinds = [self._text, self._image, self._result] if role == "user" else [self._text, self._thinking, self._call]
        return {"role": role, "content": [self._random.choice(kinds)() for _ in range(self._random.randint(1, 3))]}

    def _thinking(self) -> dict[str, Any]:
        if self._random.random() < 0.2:
            return {"type": "redacted_thinking", "data": "opaque"}
        return {"type": "thinking", "thinking": "Let me see.", "signature": "s"}

    def _call(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"q": "東京", "n": [1.5, None]}}

    def _result(self) -> dict[str, Any]:
        pick = self._random.choice
        content = pick((pick(TEXTS), [self._text(), self._image()], [self._text(), self._text()]))
        return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, "is_error": False}


Predicted = tuple[list[int], list[tuple[str, int, int]], dict[str, Any]]


def predicted(predictor: Predictor, traits: TemplateTraits, body: dict[str, Any]) -> Predicted | str:
    """Return ids and images of the router's chat, and the body that engines get; or why it is refused."""
    try:
        return chat_of(predictor, parse_messages(json.dumps(body).encode(), Limits(), predictor.model, traits=traits))
    except (RequestError, ValueError) as error:
        return str(error)


def chat_of(predictor: Predictor, request: ChatRequest) -> Predicted:
    shown, rewrites = [], []
    for image in request.images:
        data = image.inline.data if image.inline is not None else decode(image.url)
        size = probe(data, max_pixels=MAX_PIXELS, exif=predictor.family.rotates_exif)
        identity = media_identity(data, predictor.family.pixel_options, key=predictor.key)
        count = predictor.family.count(size.width, size.height)
        shown.append(PromptImage(identity, count, (size.width, size.height)))
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        rewrites.append(ImageRewrite(image.message, image.part, url, to_wire(identity)))
    expanded = predictor.prompter.prompt(request.body, shown)
    chat = VLLM.rewrite_chat(request.body, rewrites, model=predictor.model, cache_salt="salt").body
    places = [(to_wire(span.identity), span.offset, span.length) for span in expanded.spans]
    return expanded.ids.tolist(), places, chat


def context(model_dir: Path) -> tuple[str, str]:
    return "--max-model-len", str(context_length(model_dir))


@pytest.mark.parametrize("family", setup_families())
def test_the_prompt_of_a_message_request_is_the_engines_own(
    vllm_env: Path, shrunk: Shrunk, family: str, tmp_path: Path, record: Record
) -> None:
    model_dir = shrunk(REPOSITORIES[family])
    predictor = Predictor.load(model_dir, BLOCK_SIZE)
    traits, drawing = TemplateTraits.of(predictor.prompter), Drawing(1)
    both, images, refused = 0, 0, list[str]()
    with renderer(vllm_env, model_dir, tmp_path / "renderer.log", *FLAGS, *context(model_dir)) as running:
        for number in range(MOST):
            if number >= DRAWN and both >= LEAST:
                break
            body = drawing.request(predictor.model)
            answer = running.client.post(
                "/v1/messages/render", json={**body, "mm_payload": "none"}, headers={"connection": "close"}
            )
            theirs = Rendered(answer.status_code, answer.json() if answer.status_code < 500 else {})
            made = predicted(predictor, traits, body)
            if isinstance(made, str):
                assert theirs.status >= 400, f"request {number} is refused here alone: {made}\n{body}"
                refused.append(made)
                continue
            ids, places, chat = made
            if TOO_LONG in answer.text:  # only the engine knows its context
                refused.append(TOO_LONG)
                continue
            assert theirs.status == 200, f"request {number} is refused by the engine alone: {answer.text}\n{body}"
            assert ids == theirs.ids, f"request {number}: {json.dumps(body)[:3000]}"
            assert [place[1:] for place in places] == [place[1:] for place in theirs.images]
            sent = running.render(chat)  # with our identities, as the router sends it
            assert (sent.ids, sent.images) == (ids, places)
            both, images = both + 1, images + len(places)
    record(f"messages {model_dir.name}", f"prompts {both}, images {images}, mismatches 0, refused {len(refused)}")
    assert both >= LEAST
    assert images >= LEAST // 2


PROGRAM = """
import json
from vllm.entrypoints.anthropic.protocol import AnthropicContentBlock, AnthropicMessagesRequest, AnthropicTool
models = AnthropicMessagesRequest, AnthropicContentBlock, AnthropicTool
print("\\n" + json.dumps([sorted(model.model_fields) for model in models]))
"""


@pytest.mark.adopts(engine="vllm", check="fields of /v1/messages")
def test_every_field_of_a_message_request_is_judged(vllm_env: Path, figure: Figure) -> None:
    fields, blocks, tools = answer_of(vllm_env, ["-c", PROGRAM])
    for name, theirs in (("request", fields), ("block", blocks), ("tool", tools)):
        figure(name, theirs)
    assert [name for name in fields if not VLLM.request_fields[MESSAGES].knows(name)] == []
    known = frozenset().union(*BLOCKS.values())
    changes = words("tool tool_name")  # of changes of tools, which are a 400 and which vLLM has since 0.32
    assert [name for name in blocks if name not in known | changes] == []
    assert set(tools) <= TOOL_FIELDS
