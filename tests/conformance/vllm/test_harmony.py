"""gpt-oss, whose chats vLLM renders in the Harmony format: whole prompts by vLLM's own front end.

The library brings the whole vocabulary, so chats have real ids. The folder's tokenizer, which completions take, is a
stand-in of its first tokens.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.conftest import Figure
from conformance.corpus import text_corpus
from conformance.engine_process import BLOCK_SIZE, env_version
from conformance.own_code import Prompts, answer_of
from conformance.rendering import OWN_PROMPTS
from conformance.test_text_models import COMPLETIONS, REFUSED_BY_VLLM, SMALL, TextPredictor, check_blocks, ours
from conformance.workload import CODE, CONTINUED, EMOJI, SCRIPTS, STORY, Case, case, said, user
from unit.prompt.o200k import SPECIAL, write

from mmrouter_lib.engines.base.release_order import is_before
from mmrouter_lib.engines.prompters import response_chat
from mmrouter_lib.engines.text_models import load_text_prompter
from mmrouter_lib.prompt import HarmonyPrompter
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import Limits, parse_responses

Object = dict[str, Any]
DAY, VARIABLE = "2026-02-03", "VLLM_SYSTEM_START_DATE"
CONFIG = SMALL | {  # without windows, whose blocks other tests compare (conformance.nomodel)
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201_088,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4_096,
        "truncate": False,
    },
}
ON_A_DAY = """
import os, runpy, sys
name, value = sys.argv.pop().split("=")
os.environ[name] = value
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""Runs a program with a variable of vLLM's: without it, kept answers would have the day on which they were made."""
DRAWN = 600
EFFORTS = ("low", "medium", "high", "high", "none", "minimal", "max")
TYPES: list[dict[str, Any]] = [
    {"type": "string", "description": "A place\nof two lines", "enum": ["a", 'b "quoted"', "ü"]},
    {"type": "string", "default": "x"},
    {"type": ["string", "null"], "examples": ["a", "b"]},
    {"type": "number", "minimum": 0.5, "default": 1e30},
    {"type": "integer", "nullable": True, "default": None, "description": ""},
    {"type": "boolean", "default": False},
    {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}},
    {"type": "array"},
    {"type": "object", "additionalProperties": {"type": "string"}},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Any"},
    {"oneOf": [{"type": "string", "description": "One"}, {"const": 5}], "default": "a"},
    {"$ref": "#/$defs/X"},
    {"enum": [1, None, True]},
    {"allOf": [{"type": "object", "properties": {}}]},
    {},
]
"""Schemas of arguments, in what the library distinguishes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gpt-oss"), **CONFIG)


def drawn() -> Iterator[Case]:
    """Conversations as the format has them, and a few in which something is out of place."""
    draw = random.Random(11)
    special = [f"<|{name}|>" for name in SPECIAL]
    words = [*STORY.split(), *SCRIPTS.split(), *EMOJI.split(), *CODE.split(" "), *special, "\n", " ", ""]
    words += ["<|start|>assistant<|channel|>final<|message|>", "# Instructions", "\N{OBJECT REPLACEMENT CHARACTER}"]

    def text(most: int = 30) -> str:
        return draw.choice((" ", " ", "\n", "")).join(draw.choice(words) for _ in range(draw.randint(1, most)))

    def parts(role: str) -> dict[str, Any]:
        made = user(*[draw.choice((text(8), text(8), "")) for _ in range(draw.randint(2, 4))])
        if draw.random() < 0.2:
            made["content"][0]["cache_control"] = {"type": "ephemeral"}
        return {**made, "role": role}

    def content(role: str) -> dict[str, Any]:
        return parts(role) if draw.random() < 0.25 else said(role, draw.choice((text(), text(), text(), "")))

    def schema() -> dict[str, Any]:
        names = draw.sample(["place", "n", "a b", "größe", "x-y", "type", "2nd"], draw.randint(0, 5))
        properties = {name: draw.choice(TYPES) for name in names}
        made = {"type": "object", "properties": properties, "required": draw.sample(names, len(names) // 2)}
        return made | ({"additionalProperties": False, "$defs": {"X": {}}} if draw.random() < 0.3 else {})

    def tool(number: int) -> dict[str, Any]:
        function: dict[str, Any] = {"name": draw.choice(("now", f"tool_{number}", f"a.b-{number}", "größe", "a b"))}
        if draw.random() < 0.7:
            function["description"] = draw.choice((text(12), "", "Two\nlines", None))
        if draw.random() < 0.8:
            function["parameters"] = draw.choice((schema(), schema(), schema(), {}, None, {"type": "string"}))
        if draw.random() < 0.1:
            function["strict"] = True
        return {"type": "function", "function": function}

    def call(number: str) -> dict[str, Any]:
        arguments = json.dumps({"place": text(3), "n": draw.random()}, ensure_ascii=draw.random() < 0.5)
        arguments = draw.choice((arguments, arguments, arguments, "{}", "", "no JSON"))
        name = draw.choice(("weather", "weather", "a.b", "größe", "a to=b", "two words", "", "x" * 60, " json", "\n"))
        name = "<|end|>" if draw.random() < 0.01 else name
        return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}

    def reasoned(message: dict[str, Any]) -> dict[str, Any]:
        if draw.random() < 0.5:
            message[draw.choice(("reasoning", "reasoning_content"))] = draw.choice((text(10), text(10), "", None))
        return message

    def calls() -> list[dict[str, Any]]:
        names = [draw.choice(("call_", "")) + str(draw.randrange(1000)) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        asked = draw.choice((parts("assistant"), {"role": "assistant", "content": None}, said("assistant", text(5))))
        asked = reasoned({**asked, "tool_calls": [call(each) for each in names]})
        results = [{**content("tool"), "tool_call_id": each} for each in names]
        if draw.random() < 0.3:
            results = [{**one, "name": "weather"} for one in results]
        if draw.random() < 0.1:
            results = [{**one, "tool_call_id": "another"} for one in results]
        return [asked, *(results if draw.random() < 0.9 else results[1:])]

    def answer() -> dict[str, Any]:
        made = reasoned(content("assistant"))
        if draw.random() < 0.1:
            made["content"] = None
        if draw.random() < 0.1:
            made |= {"refusal": None, "function_call": None, "annotations": [], "audio": None, "tool_calls": []}
        return made

    for number in range(DRAWN):
        history = [content(draw.choice(("system", "developer")))] if draw.random() < 0.5 else []
        extra: dict[str, Any] = {}
        if draw.random() < 0.5:
            extra["tools"] = [tool(at) for at in range(draw.randint(1, 4))]
        for _ in range(draw.randint(0, 3)):
            history += [content("user")]
            for _ in range(draw.choice((0, 0, 1, 1, 2))):
                history += calls()
            history += [answer()]
        history.append(content("user"))
        if draw.random() < 0.3:
            history += calls()
        if draw.random() < 0.2:
            odd = draw.choice(("system", "developer", "user", "assistant"))
            history.insert(draw.randrange(len(history)), content(odd))
        if draw.random() < 0.03:
            history.insert(draw.randrange(len(history)), said("critic", "No."))
        if draw.random() < 0.15:
            history.append(answer())
        if draw.random() < 0.1:
            extra |= draw.choice((CONTINUED, {"continue_final_message": True}, {"add_generation_prompt": False}))
        if draw.random() < 0.03:
            extra |= {"continue_final_message": True, "add_generation_prompt": True}
        if draw.random() < 0.2:
            extra["reasoning_effort"] = draw.choice(EFFORTS)
        if draw.random() < 0.1:
            extra |= draw.choice(({"documents": [{"text": "a"}]}, {"add_special_tokens": True}))
            extra |= {"chat_template_kwargs": {"enable_thinking": False, "model_identity": "Me", "tools": []}}
        if draw.random() < 0.1:
            extra["tool_choice"] = draw.choice(("none", "auto", "required")) if "tools" in extra else "none"
        yield case(f"harmony {number}", *history, **extra)


def cases() -> list[Case]:
    return [*text_corpus(), *drawn()]


def responses() -> Iterator[Object]:
    """Yield the drawn conversations as requests of /v1/responses."""
    draw = random.Random(12)
    for one in drawn():
        items = [item for message in one.body["messages"] for item in items_of(message, draw)]
        only = items[0].get("content") if len(items) == 1 else None
        body: Object = {"input": only if isinstance(only, str) and draw.random() < 0.5 else items}
        if draw.random() < 0.4:
            body["instructions"] = draw.choice(("Be brief.", "", "Zoë\n", STORY))
        if tools := [tool["function"] for tool in one.body.get("tools") or ()]:
            body["tools"] = [{"parameters": None, **tool, "type": "function"} for tool in tools]
            body["tool_choice"] = draw.choice(("none", "auto", "required"))
        if effort := one.body.get("reasoning_effort"):
            body["reasoning"] = {"effort": effort}
        yield body


def items_of(message: Object, draw: random.Random) -> Iterator[Object]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        output = content if isinstance(content, str) else "".join(part["text"] for part in content)
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}
        return
    if thought := message.get("reasoning") or message.get("reasoning_content"):
        texts = [{"type": "reasoning_text", "text": text} for text in (thought, "", "More.")[: draw.randint(0, 3)]]
        texts = texts if draw.random() < 0.9 else texts[1:2]
        yield {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Seen."}],
            "content": texts,
        }
    if isinstance(content, str):
        yield {**draw.choice(({}, {"type": "message"})), "role": role, "content": content}
    elif content is not None:
        answered = role == "assistant"
        part = {"type": "output_text", "annotations": []} if answered else {"type": "input_text"}
        kept = {"type": "message", "id": "msg_1", "status": "completed"} if answered else {}
        yield {**kept, "role": role, "content": [{**part, "text": each["text"]} for each in content]}
    for call in message.get("tool_calls") or ():
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


@pytest.fixture(scope="module")
def vllms(vllm_env: Path, folder: Path) -> Prompts:
    if is_before((0, 31), env_version(vllm_env)):
        pytest.skip("not run: vLLM 0.30 requires openai-harmony, which fetches its vocabulary from the network")
    bodies = {"chats": [one.body for one in cases()], "completions": COMPLETIONS, "responses": list(responses())}
    command = ["-c", ON_A_DAY, OWN_PROMPTS, f"{VARIABLE}={DAY}"]
    (found,) = answer_of(vllm_env, command, [{"folder": str(folder), **bodies}])
    return Prompts(found)


def verdict(mine: Any, answer: Any, *, refused: bool = False) -> str:
    """Compare a prediction, or the text of an error, with vLLM's answer. ``refused``: by vLLM alone, as is known."""
    if not isinstance(answer, list):
        return "refused" if refused or isinstance(mine, str) else "wrong"
    if isinstance(mine, str) and mine.startswith("NotModelledError"):
        return "not predicted"
    return "equal" if mine == answer else "wrong"


@pytest.mark.adopts(engine="vllm", check="prompts in the Harmony format")
def test_vllms_prompts_of_gpt_oss_are_the_predicted_ones(
    folder: Path, vllms: Prompts, record: Record, figure: Figure
) -> None:
    prompter, theirs = load_text_prompter("vllm", folder, variables=[{VARIABLE: DAY}]), vllms.listed()
    assert isinstance(prompter, HarmonyPrompter)
    found: dict[str, list[str]] = {"equal": [], "refused": [], "not predicted": [], "wrong": []}
    for one, answer in zip(cases(), theirs, strict=False):
        mine = ours(prompter, one)
        result = verdict(mine, answer, refused=one.name in REFUSED_BY_VLLM)
        found[result].append(f"{one.name}: {mine} for {answer}" if result == "wrong" else one.name)
    compared, wrong = len(found["equal"]), found["wrong"]
    figure("conversations", compared)
    figure("mismatches", len(wrong))
    record("the Harmony format", {name: len(names) for name, names in found.items()})
    assert "\n".join(wrong) == ""
    for completion, ids in zip(COMPLETIONS, theirs[len(cases()) :], strict=False):
        special = bool(completion["add_special_tokens"])
        assert prompter.completion(str(completion["prompt"]), add_special_tokens=special).ids.tolist() == ids
    assert compared > 900
    assert found["not predicted"] == ["no parts", "refusal part"]  # routers turn the second into a text


@pytest.mark.adopts(engine="vllm", check="responses in the Harmony format")
def test_vllms_prompts_of_responses_of_gpt_oss_are_the_predicted_ones(
    folder: Path, vllms: Prompts, record: Record, figure: Figure
) -> None:
    prompter = load_text_prompter("vllm", folder, variables=[{VARIABLE: DAY}])
    bodies = list(responses())
    theirs = vllms.listed()[-len(bodies) :]
    wrong, affinity, found = [], Counter[str](), Counter[str]()
    for number, (body, answer) in enumerate(zip(bodies, theirs, strict=True)):
        raw = json.dumps({**body, "model": "m"}).encode()
        try:
            request = parse_responses(raw, Limits(), "m", chat_of=response_chat("vllm", prompter))
            if request.as_chat is None:
                affinity[re.sub(r"\d+", "N", request.inexact[0].label)] += 1
                continue
            mine: Any = prompter.prompt(request.as_chat, ()).ids.tolist()
        except (RequestError, ValueError) as error:
            mine = str(error)
        result = verdict(mine, answer)
        found[result] += 1
        if result not in ("equal", "refused"):
            wrong.append(f"{number}, {body}: {mine} for {answer}")
    figure("prompts", found["equal"])
    figure("mismatches", len(wrong))
    record("responses in the Harmony format", {**found, "by affinity": dict(affinity)})
    assert "\n".join(wrong) == ""
    assert set(affinity) == {f"not_modelled:input[N].{field}" for field in ("call_id", "content", "role")}
    assert found["equal"] > 250


@pytest.mark.long_form
def test_an_engines_blocks_of_gpt_oss_are_the_predicted_ones(
    vllm_env: Path, folder: Path, tmp_path: Path, record: Record
) -> None:
    """The day is that of both clocks, as in a deployment."""
    prompter = load_text_prompter("vllm", folder)
    predictor = TextPredictor(prompter.family, prompter, folder.name, BLOCK_SIZE)
    own = [one for one in drawn() if one.body.get("tool_choice") in (None, "none")][:60]
    check_blocks(vllm_env, folder, tmp_path / "engine.log", predictor, own, record, "vllm gpt-oss")
