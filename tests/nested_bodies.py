"""Requests with an object at every place where clients may set names, and what the router makes of a name there."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import orjson

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.engines.base.request_fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import PARSERS, Limits, TemplateTraits

URL = {"url": "data:,x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}, "structures": [{"begin": "a", "end": "b"}]}
ANSWER = {
    "stream_options": {"include_usage": True},
    "response_format": FORMAT,
    "structured_outputs": {"regex": "x"},
    "repetition_detection": {"min_count": 2},
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x"},
                    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                    *({"type": kind, kind: URL} for kind in ("image_url", "video_url", "audio_url")),
                ],
            },
            {
                "role": "assistant",
                "content": [{"type": kind, kind: "x"} for kind in ("thinking", "refusal")],
                "tool_calls": [CALL],
            },
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "reasoning": {"effort": "low"},
        **ANSWER,
    },
    COMPLETIONS: {"prompt": "x", **ANSWER},
    RESPONSES: {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": URL}],
            },
            {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        ],
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "stream_options": {"include_obfuscation": False},
    },
    MESSAGES: {
        "max_tokens": 2,
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": "x"},
                    {"type": "text", "text": "x"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    IMAGE,
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}, IMAGE]},
                ],
            },
        ],
        "tools": [{"type": "custom", "name": "f", "input_schema": {}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    },
}
OWN_NAMES = frozenset({"schema", "input_schema", "input"})
"""Fields of these bodies whose objects have any names; the input of a response is a list."""

REFUSALS = frozenset({"unknown_parameter", "unsupported_parameter", "ambiguous_content_part"})
REFUSALS |= {"unsupported_content_part"}


def full_body(endpoint: str, engine: EngineType) -> dict[str, Any]:
    """Return the body of an endpoint with the fields that an engine knows."""
    fields = ADAPTERS[engine].request_fields[endpoint]  # type: ignore[index]
    own = {"model": "m"} | {name: value for name, value in BODIES[endpoint].items() if fields.knows(name)}
    made: dict[str, Any] = orjson.loads(orjson.dumps(own))  # without shared objects
    return made


def objects_in(value: Any, place: str = "", path: str = "") -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield place (``a[].b``), path (``a[0].b``) and object of every object inside a body."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from objects_in(item, f"{place}[]", f"{path}[{number}]")
    elif isinstance(value, dict):
        if place:
            yield place, path, value
        for name, item in value.items():
            if not (name in OWN_NAMES and isinstance(item, dict)):
                yield from objects_in(item, f"{place}.{name}".lstrip("."), f"{path}.{name}".lstrip("."))


def refusal(endpoint: str, engine: EngineType, body: Mapping[str, Any], *, modelled: bool = True) -> str:
    """Return the field that a request is refused for, because its name has no place there; else empty."""
    parse = PARSERS[endpoint]
    if endpoint == RESPONSES:
        parse = partial(parse, modelled=modelled)
    elif endpoint == MESSAGES:
        parse = partial(parse, traits=TemplateTraits())
    try:
        parse(orjson.dumps(body), Limits(), "m", engine)
    except RequestError as error:
        return error.param or "" if error.code in REFUSALS else ""
    return ""
