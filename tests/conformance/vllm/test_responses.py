"""Drawn requests of /v1/responses: the prompt of the chat that the router makes, against vLLM's own for the request.

The engine's side is vLLM's own code for both endpoints, without an engine (``own_prompts.py``).
"""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.conftest import Figure, Shrunk
from conformance.engine_process import BLOCK_SIZE, context_length, env_version
from conformance.own_code import Prompts, answer_of
from conformance.prediction import Predictor
from conformance.rendering import own_prompts
from conformance.setups import REPOSITORIES, setup_families
from conformance.vllm.test_messages import SIZES, chat_of
from conformance.workload import picture

from mmrouter_lib.engines.base.release_order import is_before
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import Limits, parse_responses
from mmrouter_router.intake.responses import ITEMS, PARTS, TOOL_FIELDS

DRAWN = 250
LEAST = 60  # requests that both sides render; templates refuse some, such as two messages of one role in a row
TEXTS = ("Hello.", "Zoë, 東京 👩🏽‍🚀", "two\nlines \n", "What is this?", "")
TOOLS = [
    {"type": "function", "name": "look", "description": "Look it up.", "parameters": {"type": "object"}},
    {"type": "function", "name": "wait", "parameters": {"properties": {"s": {"type": "number"}}}, "strict": True},
    {"type": "function", "name": "see", "defer_loading": True, "allowed_callers": ["direct"]},
]
Object = dict[str, Any]


class Drawing:
    """Draws the requests of conversations, which are sent whole and grow."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        pictures = [picture(*size, seed=number) for number, size in enumerate(SIZES)]
        self._urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in pictures]

    def requests(self, count: int) -> list[Object]:
        made: list[Object] = []
        while len(made) < count:
            fields, items = self._fields(), list[Object]()
            for _ in range(self._random.randint(1, 3)):
                items = [*items, *self._user()]
                made.append({**fields, "input": self._input(items)})
                items = [*items, *self._assistant()]
            if self._random.random() < 0.3:
                status = self._random.choice(("in_progress", "incomplete"))
                made.append({**fields, "input": [*items, {**_said("And so"), "status": status}]})
        return made[:count]

    def _input(self, items: list[Object]) -> Any:
        only = items[0].get("content") if len(items) == 1 else None
        return only if isinstance(only, str) and self._random.random() < 0.5 else items

    def _fields(self) -> Object:
        chance, pick = self._random.random, self._random.choice
        body: Object = {}
        if chance() < 0.5:
            body["instructions"] = pick(TEXTS)
        if chance() < 0.4:
            body["tools"] = TOOLS[: self._random.randint(1, 3)]
            if chance() < 0.5:
                body["tool_choice"] = pick(("none", "auto"))
        if chance() < 0.3:
            body["reasoning"] = pick(({"effort": "none"}, {"effort": "high"}, {"summary": "auto"}))
        if chance() < 0.2:
            body["chat_template_kwargs"] = {"enable_thinking": chance() < 0.5}
        if chance() < 0.2:
            body["text"] = {"format": {"type": "json_object"}}
        return body

    def _user(self) -> list[Object]:
        items: list[Object] = []
        if self._random.random() < 0.15:
            items.append({"role": self._random.choice(("system", "developer")), "content": self._random.choice(TEXTS)})
        typed = {"type": "message"} if self._random.random() < 0.5 else {}
        content = self._random.choice(TEXTS) if self._random.random() < 0.3 else self._parts()
        return [*items, {**typed, "role": "user", "content": content}]

    def _parts(self) -> list[Object]:
        return [self._random.choice((self._text, self._image))() for _ in range(self._random.randint(1, 3))]

    def _text(self) -> Object:
        return {"type": "input_text", "text": self._random.choice(TEXTS)}

    def _image(self) -> Object:
        detail = {"detail": "low"} if self._random.random() < 0.3 else {}
        return {"type": "input_image", "image_url": self._random.choice(self._urls), **detail}

    def _output(self) -> Any:
        """In the output of a tool, vLLM refuses an image without detail; the router forwards it as part of a chat."""
        if self._random.random() < 0.5:
            return self._random.choice(TEXTS)
        return [{"detail": "auto", **part} if part["type"] == "input_image" else part for part in self._parts()]

    def _assistant(self) -> list[Object]:
        chance = self._random.random
        items = [self._thought()] if chance() < 0.4 else []
        if chance() < 0.7:
            items.append(self._said())
        if chance() < 0.4 or not items:
            for number in range(self._random.randint(1, 2)):
                arguments = self._random.choice(('{"q": "東京", "n": [1.5, null]}', "{}", "", "no JSON"))
                call = {"type": "function_call", "call_id": f"c{number}", "name": "look", "arguments": arguments}
                items.append(call)
            results = [{"type": "function_call_output", "call_id": f"c{number}", "output": self._output()}]
            items += results[: self._random.randint(0, 1)]
        return items

    def _said(self) -> Object:
        texts = [self._random.choice(TEXTS) for _ in range(self._random.randint(1, 2))]
        if self._random.random() < 0.3:
            return {"role": "assistant", "content": texts[0]}
        return _said(*texts)

    def _thought(self) -> Object:
        content = [{"type": "reasoning_text", "text": "Let me see."}]
        summary = [{"type": "summary_text", "text": "Seen."}]
        pick = self._random.choice(({"summary": [], "content": content}, {"summary": summary}, {"summary": []}))
        return {"type": "reasoning", "id": "rs_1", **pick}


def _said(*texts: str) -> Object:
    content = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def made_here(predictor: Predictor, body: Object) -> Any:
    """Return ids and images of the router's chat, and the body that engines get; or why it is refused."""
    raw = json.dumps({**body, "model": predictor.model}).encode()
    try:  # own_prompts.py has no parser of tool calls
        request = parse_responses(raw, Limits(), predictor.model, parses_tools=False)
        assert request.inexact == ()
        return chat_of(predictor, request)
    except (RequestError, ValueError) as error:
        return str(error)


def ids_and_images(answer: Any) -> tuple[list[int], list[list[Any]]]:
    return (answer, []) if isinstance(answer, list) else (answer["ids"], answer["images"])


@pytest.fixture(scope="module")
def bodies() -> list[Object]:
    return Drawing(1).requests(DRAWN)


@pytest.fixture(scope="module")
def made(shrunk: Shrunk, bodies: list[Object]) -> dict[str, list[Any]]:
    """Ids, images and chat of each family's requests, or why they are refused."""
    predictors = {family: Predictor.load(shrunk(REPOSITORIES[family]), BLOCK_SIZE) for family in setup_families()}
    return {family: [made_here(one, body) for body in bodies] for family, one in predictors.items()}


@pytest.fixture(scope="module")
def engines_prompts(
    vllm_env: Path, shrunk: Shrunk, bodies: list[Object], made: dict[str, list[Any]]
) -> dict[Path, Prompts]:
    asked = {}
    for family, requests in made.items():
        model_dir = shrunk(REPOSITORIES[family])
        chats = [each[2] for each in requests if not isinstance(each, str)]
        asked[model_dir] = {"context": context_length(model_dir), "chats": chats, "responses": bodies}
    return own_prompts(vllm_env, asked)


@pytest.mark.adopts(engine="vllm", check="prompts of chats and /v1/responses")
@pytest.mark.parametrize("family", setup_families())
def test_the_prompt_of_a_responses_request_is_the_engines_own(
    family: str,
    vllm_env: Path,
    shrunk: Shrunk,
    bodies: list[Object],
    made: dict[str, list[Any]],
    engines_prompts: dict[Path, Prompts],
    record: Record,
    figure: Figure,
) -> None:
    model_dir = shrunk(REPOSITORIES[family])
    # 0.30's own route refuses an image without detail, which it takes in the chat that the router makes of the request.
    takes_fewer_images = is_before((0, 31), env_version(vllm_env))
    answers = engines_prompts[model_dir].listed()
    chats = len(answers) - len(bodies)
    sent, theirs = iter(answers[:chats]), answers[chats:]
    both = images = alone = 0
    for number, (body, ours, own) in enumerate(zip(bodies, made[family], theirs, strict=True)):
        shown = f"request {number}: {json.dumps(body)[:3000]}"
        refused = own.get("refused") if isinstance(own, dict) else None
        if isinstance(ours, str):
            assert refused, f"refused here alone: {ours}\n{shown}"
            continue
        ids, places, _ = ours
        if refused:
            assert takes_fewer_images, f"refused by the engine alone: {refused}\n{shown}"
            alone += 1
        else:
            expected, named = ids_and_images(own)
            assert ids == expected, shown
            assert [list(place[1:]) for place in places] == [place[1:] for place in named], shown
        of_chat = ids_and_images(next(sent))  # with our identities, as the router sends it
        assert of_chat == (ids, [list(place) for place in places]), shown
        both, images = both + 1, images + len(places)
    figure("prompts", both)
    figure("images", images)
    figure("refused by the engine's route", alone)
    record(f"responses {model_dir.name}", f"prompts {both}, images {images}, mismatches 0, refused {DRAWN - both}")
    assert both >= LEAST
    assert images >= LEAST // 2


PROGRAM = """
import json
from openai.types.responses import (
    FunctionTool, ResponseFunctionToolCall, ResponseFunctionToolCallOutputItem, ResponseOutputMessage,
    ResponseOutputRefusal, ResponseOutputText, ResponseReasoningItem,
)
from openai.types.responses.response_input_image_param import ResponseInputImageParam
from openai.types.responses.response_input_text_param import ResponseInputTextParam
models = {
    "function_call": ResponseFunctionToolCall, "function_call_output": ResponseFunctionToolCallOutputItem,
    "message": ResponseOutputMessage, "reasoning": ResponseReasoningItem, "tool": FunctionTool,
    "output_text": ResponseOutputText, "refusal": ResponseOutputRefusal,
}
parts = {"input_text": ResponseInputTextParam, "input_image": ResponseInputImageParam}
fields = {name: [field.alias or key for key, field in model.model_fields.items()] for name, model in models.items()}
fields |= {name: sorted(part.__annotations__) for name, part in parts.items()}
print("\\n" + json.dumps(fields))
"""


@pytest.mark.adopts(engine="vllm", check="items of /v1/responses")
def test_every_field_of_an_item_a_part_and_a_tool_is_known(vllm_env: Path, figure: Figure) -> None:
    fields = answer_of(vllm_env, ["-c", PROGRAM])
    for name, theirs in fields.items():
        figure(name, sorted(theirs))
    known = {**ITEMS, **PARTS, "tool": TOOL_FIELDS}
    assert {name: unknown for name, own in fields.items() if (unknown := sorted({*own} - known[name]))} == {}
