"""Requests for several answers, probabilities and forms, and the form of a vLLM's answer to each.

The simulated engine and a real one answer alike (``tests/unit/sim/test_answers.py``,
``tests/conformance/vllm/test_fields.py``).
"""

from itertools import groupby
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "sides": {"type": "array", "items": {"type": "integer"}}},
    "required": ["color", "sides"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}
CHAT = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 3, "temperature": 0}
COMPLETION = {"prompt": ["Say hello.", "Say more."], "max_tokens": 3, "temperature": 0}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "several answers": ("/v1/chat/completions", {**CHAT, "n": 2, "temperature": 1}),
    "probabilities": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}),
    "several prompts": ("/v1/completions", {**COMPLETION, "n": 2, "temperature": 1, "logprobs": 1}),
    "echo": ("/v1/completions", {**COMPLETION, "echo": True}),
}


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what a client reads of an answer, without its words: equal for engines with other weights."""
    choices = [
        {
            "index": choice["index"],
            "finish": choice["finish_reason"],
            "probabilities": _form(choice.get("logprobs")),
            "echoes": choice.get("text", "").startswith("Say "),
        }
        for choice in answer["choices"]
    ]
    usage = answer["usage"]
    return {"choices": choices, "tokens": [usage["completion_tokens"], usage["total_tokens"] - usage["prompt_tokens"]]}


def _form(value: Any) -> Any:
    """Return the names and types of a value. A token's bytes and its text are as long as they are."""
    if isinstance(value, dict):
        named = {name: _form(item) for name, item in value.items() if name != "bytes"}
        return named if set(value) & {"content", "token", "tokens"} else "by token"
    if isinstance(value, list):
        return [_form(item) for item in value]
    return type(value).__name__


def _completion(index: int, *, probabilities: bool, echoes: bool) -> dict[str, Any]:
    form = {
        "text_offset": ["int"] * 3,
        "token_logprobs": ["float"] * 3,
        "tokens": ["str"] * 3,
        "top_logprobs": ["by token"] * 3,
    }
    return {
        "index": index,
        "finish": "length",
        "probabilities": form if probabilities else "NoneType",
        "echoes": echoes,
    }


_ALONE = {"finish": "length", "probabilities": "NoneType", "echoes": False}
_TOKEN = {"token": "str", "logprob": "float"}
EXPECTED: dict[str, dict[str, Any]] = {
    "several answers": {"choices": [{"index": 0, **_ALONE}, {"index": 1, **_ALONE}], "tokens": [6, 6]},
    "probabilities": {
        "choices": [{"index": 0, **_ALONE, "probabilities": {"content": [{**_TOKEN, "top_logprobs": [_TOKEN]}] * 3}}],
        "tokens": [3, 3],
    },
    "several prompts": {
        "choices": [_completion(index, probabilities=True, echoes=False) for index in range(4)],
        "tokens": [12, 12],
    },
    "echo": {"choices": [_completion(index, probabilities=False, echoes=True) for index in range(2)], "tokens": [6, 6]},
}


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"structured_outputs": {"regex": r"(red|green)-[0-9]{2}"}}, r"(red|green)-[0-9]{2}"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "EBNF": ({"structured_outputs": {"grammar": 'root ::= "a" root | [b-d]{2}'}}, "a*[b-d]{2}"),
    "Lark": ({"structured_outputs": {"grammar": 'start: "a" X~2\nX: /[b-d]/'}}, "a[b-d]{2}"),
    "schema with a pattern": (
        {"response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": {"type": "string", "pattern": "^a{2}$"}}}},
        '"aa"',
    ),
    "structural tag": (
        {"response_format": {"type": "structural_tag", "format": {
            "type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "b+"}, "end": "</a>"}}},
        "<a>b+</a>",
    ),
}  # fmt: skip
"""Fields of a chat -> the expression that every whole answer matches."""
REFUSED_FORMS: dict[str, dict[str, Any]] = {
    "an open group": {"structured_outputs": {"regex": "(a"}},
    "a lookahead": {"structured_outputs": {"regex": "(?=a)a"}},
    "a back reference": {"structured_outputs": {"regex": r"(a)\1"}},
    "a range that ends before it begins": {"structured_outputs": {"regex": "[z-a]"}},
    "a rule that is not defined": {"structured_outputs": {"grammar": "root ::= a"}},
    "a grammar without a root": {"structured_outputs": {"grammar": 'a ::= "a"'}},
    "an open text": {"structured_outputs": {"grammar": 'start: "a'}},
    "no grammar": {"structured_outputs": {"grammar": ""}},
    "no choice": {"structured_outputs": {"choice": []}},
    "no form": {"structured_outputs": {}},
    "two forms": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    "no JSON": {"structured_outputs": {"json": "{"}},
    "a false object": {"structured_outputs": {"json_object": False}},
    "a form of no kind": {"response_format": {"type": "poem"}},
}


MESSAGE = {
    "system": "Be short.",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}],
    "max_tokens": 3,
    "temperature": 0,
}
"""A request to ``/v1/messages``."""
EVENTS = [
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
    *("message_delta", "message_stop"),
]
MESSAGE_FORM = {
    "type": "message",
    "role": "assistant",
    "content": [["text", "type"]],
    "stop": ["max_tokens", None],
    "output": 3,
}


def message_told(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what a client reads of a message, without its words."""
    return {
        "type": answer["type"],
        "role": answer["role"],
        "content": [sorted(block) for block in answer["content"]],
        "stop": [answer["stop_reason"], answer.get("stop_sequence")],
        "output": answer["usage"]["output_tokens"],
    }


def events_told(raw: str) -> list[str]:
    """Return the kinds of a stream's events, several in a row as one: an engine joins tokens that wait to be sent."""
    kinds = (line.removeprefix("event: ") for line in raw.splitlines() if line.startswith("event: "))
    return [kind for kind, _ in groupby(kinds)]
