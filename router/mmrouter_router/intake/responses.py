"""Parser for the body of ``POST /v1/responses``, which becomes a chat on vLLM: one prompt and one way to engines.

On SGLang, and for gpt-oss, it is forwarded with the prompt that is predicted for it (:mod:`.forwarded_responses`).

It is converted as vLLM 0.32 converts it (``OnlineRenderer.render_responses``), so the prompt is the one that vLLM's own
``/v1/responses`` renders. vLLM's endpoint takes no identities of images, so engines get the chat. What is not modelled
is forwarded as it is, with a reason.
"""

from dataclasses import replace
from typing import Any, Final

import orjson

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.request_fields import RESPONSES, words
from mmrouter_lib.engines.base.response_chat import ChatOf
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import json_body
from mmrouter_router.intake.chat import check_arguments, parse_extracted, parse_unextracted
from mmrouter_router.intake.field_check import Cause, Reason, check_fields
from mmrouter_router.intake.forwarded_responses import parse_forwarded_responses
from mmrouter_router.intake.forwarded_routes import STORED_FIELDS, parse_forwarded
from mmrouter_router.intake.json_body import Object, Raw, Served
from mmrouter_router.intake.request import ChatRequest, Limits

ITEMS: Final = {
    "message": words("type role content id status phase"),
    "reasoning": words("type id summary content encrypted_content status"),
    "function_call": words("type id call_id name arguments namespace status async caller"),
    "function_call_output": words("type id call_id output status name namespace caller created_by"),
}
"""Type of an input item -> its fields. Items of other types are not modelled."""
PARTS: Final = {
    "input_text": words("type text prompt_cache_breakpoint"),
    "input_image": words("type image_url detail file_id prompt_cache_breakpoint uuid content_hash"),
    "output_text": words("type text annotations logprobs prompt_cache_breakpoint"),
    "refusal": words("type refusal"),
}
"""Type of a content part -> its fields."""
TOOL_FIELDS: Final = words("type name description parameters strict defer_loading allowed_callers async output_schema")
_INPUT_PARTS: Final = ("input_text", "input_image")
_ROLES: Final = ("user", "assistant", "system", "developer")
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_UNFINISHED: Final = ("in_progress", "incomplete")
_LOGPROBS: Final = "message.output_text.logprobs"
_COPIED: Final = words(
    "stream temperature top_p top_k min_p seed stop stop_token_ids presence_penalty frequency_penalty logit_bias",
    "repetition_penalty ignore_eos include_stop_str_in_output skip_special_tokens watermarking structured_outputs",
    "priority session_id include_reasoning parallel_tool_calls chat_template_kwargs vllm_xargs mm_processor_kwargs",
    "media_io_kwargs spaces_between_special_tokens",
)
CHAT_FIELDS: Final = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "truncate_prompt_tokens": "truncation",
    "logprobs": "include",
}
"""Field of a chat that an engine's error may name -> the client's field that it was made of."""
_ANSWERED: Final = words(
    "instructions metadata parallel_tool_calls temperature top_p max_output_tokens max_tool_calls reasoning",
    "service_tier text truncation user tool_choice tools top_logprobs presence_penalty frequency_penalty",
)
"""Fields of a request that its answer repeats."""


class _NotModelledError(Exception):
    """A request whose prompt, or whose answer, is not modelled; ``reason`` names the field."""

    def __init__(self, field: str, cause: Cause = "not_modelled") -> None:
        self.reason = Reason(field, cause)


def parse_responses(
    raw: Raw,
    limits: Limits,
    served: Served,
    engine: EngineType = "vllm",
    *,
    modelled: bool = True,
    chat_of: ChatOf | None = None,
    parses_tools: bool = True,
    stored: bool = False,
) -> ChatRequest:
    """Parse a request and return its chat; ``modelled``: whether that is the prompt of this engine and model.

    Else, and with what is not modelled, returns the forwarded request. ``chat_of``: makes the chat of the same prompt
    where engines get every request as it is. ``parses_tools``: whether engines find calls of tools in answers.
    ``stored``: whether they store responses, unless the client sets ``store`` to false: such a request is forwarded,
    because a chat is not stored. Raises :class:`RequestError` only.
    """
    if not modelled:
        return parse_forwarded(raw, limits, served, engine, stored=stored)
    if chat_of is not None:
        return parse_forwarded_responses(raw, limits, served, engine, chat_of, stored=stored)
    try:
        chat = parse_extracted(raw, limits, lambda body: _parse(body, limits, served, engine, parses_tools, stored))
    except _NotModelledError as error:
        return parse_forwarded(raw, limits, served, engine, error.reason, stored=stored)
    if not chat.stored:
        return chat
    if chat.images:  # the engine names them by a hash of its own
        return parse_forwarded(raw, limits, served, engine, Reason("store", "stored_images"), stored=stored)
    made = parse_forwarded(raw, limits, served, engine, stored=stored)
    return replace(made, messages=chat.messages, inexact=chat.inexact, as_chat=chat.body)


def _parse(
    raw: Raw, limits: Limits, served: Served, engine: EngineType, parses_tools: bool, stored: bool
) -> ChatRequest:
    body = json_body.parse_object(raw, limits.max_request_bytes)
    json_body.model_of(body, served)
    check_fields(body, RESPONSES, engine, STORED_FIELDS if stored else ())
    conversion = _Conversion(limits)
    chat = conversion.chat(body) | _tools(body, parses_tools)
    request = parse_unextracted(orjson.dumps(chat), limits, served, engine)
    if body.get("truncation", "disabled") != "disabled":
        request.body["truncate_prompt_tokens"] = -1
        request.inexact = (*request.inexact, Reason("truncation", "truncation"))
    conversion.removed.update(name for name in adapter(engine).removed_fields if name in body)
    images = tuple(replace(part, param=conversion.images[part.message, part.part]) for part in request.images)
    answered = {name: value for name, value in body.items() if name in _ANSWERED}
    stored = stored and body.get("store") is not False
    return replace(request, images=images, removed=tuple(sorted(conversion.removed)), response=answered, stored=stored)


class _Conversion:
    """One request's conversion. ``images``: (message, part) -> field; ``removed``: identities that the client set."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._messages: list[Object] = []
        self.images: dict[tuple[int, int], str] = {}
        self.removed: set[str] = set()

    def chat(self, body: Object) -> Object:
        for name in ("previous_response_id", "previous_input_messages", "enable_response_messages"):
            if body.get(name):
                stored = name == "previous_response_id"
                raise _NotModelledError(name, "stored_messages" if stored else "not_modelled")
        if instructions := json_body.optional(body, "instructions", str):
            self._messages.append({"role": "system", "content": instructions})
        continued = self._input(body.get("input"))
        # vLLM's own route tokenizes with the tokenizer's special tokens, a chat without them by default.
        chat: Object = {"model": body["model"], "messages": self._messages, "add_special_tokens": True}
        chat |= {name: value for name, value in body.items() if name in _COPIED and value is not None}
        if continued:
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
        return chat | _answer_form(body) | _reasoning(body)

    def _input(self, value: Any) -> bool:
        """Add the messages of the input. Returns whether its last item is to be continued."""
        if value is None:
            raise RequestError.missing("input")
        if isinstance(value, str):
            self._messages.append({"role": "user", "content": value})
            return False
        if not isinstance(value, list) or not value:
            raise RequestError.wrong_type("input", "a string or a non-empty array", value)
        for number, item in enumerate(value):
            path = f"input[{number}]"
            if not isinstance(item, dict):
                raise RequestError.wrong_type(path, "an object", item)
            kind = json_body.optional(item, "type", str, f"{path}.type") or "message"
            if kind not in ITEMS:
                raise _NotModelledError(f"{path}.type")
            json_body.known_keys(item, ITEMS[kind], path)
            if kind == "message":
                self._message(item, path)
            elif kind == "reasoning":
                self._extend("reasoning", _reasoning_text(item, path))
            elif kind == "function_call":
                self._call(item, path)
            else:
                output = item.get("output")
                content = output if isinstance(output, str) else self._parts(output, f"{path}.output")
                call = json_body.required(item, "call_id", str, f"{path}.call_id")
                self._messages.append({"role": "tool", "tool_call_id": call, "content": content})
        return _is_continued(value[-1])

    def _message(self, item: Object, path: str) -> None:
        role = json_body.required(item, "role", str, f"{path}.role")
        if role not in _ROLES:
            raise RequestError.unknown_value(f"{path}.role", role, _ROLES)
        content = item.get("content")
        if role == "assistant":
            text = content if isinstance(content, str) else _first_text(content, f"{path}.content")
            if text is None:
                self._messages.append({"role": role, "content": []})
            else:
                self._extend("content", text)
            return
        if not isinstance(content, str):
            content = self._parts(content, f"{path}.content")
        self._messages.append({"role": role, "content": content})

    def _parts(self, value: Any, path: str) -> list[Object]:
        """Return the content parts of a message that is about to be added."""
        if value is None:
            raise RequestError.missing(path)
        if not isinstance(value, list):
            raise RequestError.wrong_type(path, "a string or an array of content parts", value)
        parts: list[Object] = []
        for number, part in enumerate(value):
            place = f"{path}[{number}]"
            kind = _part_type(part, place, _INPUT_PARTS)
            if kind == "input_text":
                parts.append({"type": "text", "text": json_body.required(part, "text", str, f"{place}.text")})
                continue
            if part.get("file_id") is not None:
                why = "engines fetch and keep nothing; put the media into the request"
                raise json_body.unsupported(f"{place}.file_id", why)
            self.removed.update(name for name in ("uuid", "content_hash") if part.get(name) is not None)
            _, _, url, param = json_body.media_url(part, "image_url", f"{place}.image_url")
            self.images[len(self._messages), number] = param
            json_body.count_media(len(self.images), self._limits.max_images, param)
            parts.append({"type": "image_url", "image_url": {"url": url}})
        return parts

    def _call(self, item: Object, path: str) -> None:
        if item.get("namespace"):
            raise _NotModelledError(f"{path}.namespace")
        function = {
            "name": json_body.required(item, "name", str, f"{path}.name"),
            "arguments": json_body.required(item, "arguments", str, f"{path}.arguments"),
        }
        check_arguments(function["arguments"], f"{path}.arguments")
        call = json_body.required(item, "call_id", str, f"{path}.call_id")
        made = {"id": call, "type": "function", "function": function}
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(made)
        else:
            self._messages.append({"role": "assistant", "tool_calls": [made]})

    def _extend(self, field: str, value: str) -> None:
        """Set a field of the assistant's message that the input ends with so far, or begin another message."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == "assistant" and field not in last:
            last[field] = value
        else:
            self._messages.append({"role": "assistant", field: value})


def _part_type(part: Any, path: str, known: tuple[str, ...]) -> str:
    if not isinstance(part, dict):
        raise RequestError.wrong_type(path, "an object", part)
    kind = json_body.required(part, "type", str, f"{path}.type")
    if kind not in known:
        raise RequestError.unknown_part(f"{path}.type", kind, known)
    json_body.known_keys(part, PARTS[kind], path)
    return kind


def _first_text(value: Any, path: str) -> str | None:
    """Return the text of the first part of an assistant's message, the only one that vLLM reads; ``None``: no part."""
    if not isinstance(value, list):
        raise RequestError.wrong_type(path, "a string or an array of content parts", value)
    kinds = [_part_type(part, f"{path}[{number}]", tuple(PARTS)) for number, part in enumerate(value)]
    if not kinds:
        return None
    if kinds[0] not in ("output_text", "input_text"):
        raise _NotModelledError(f"{path}[0].type")
    return json_body.required(value[0], "text", str, f"{path}[0].text")


def _reasoning_text(item: Object, path: str) -> str:
    if item.get("encrypted_content"):
        raise json_body.unsupported(f"{path}.encrypted_content", "engines have no key for it")
    for name in ("content", "summary"):
        if texts := json_body.objects(item, name, f"{path}.{name}"):
            return json_body.required(texts[0], "text", str, f"{path}.{name}[0].text")
    return ""


def _is_continued(item: Object) -> bool:
    """Return whether a last item is continued by the answer, as vLLM decides it: an unfinished message or reasoning."""
    return (item.get("type") or "message") in ("message", "reasoning") and item.get("status") in _UNFINISHED


def _answer_form(body: Object) -> Object:
    """Return the fields of a chat about the form of its answer."""
    made: Object = {"stream_options": {"include_usage": True}} if body.get("stream") else {}
    if (limit := json_body.max_tokens(body, "max_output_tokens")) is not None:
        made["max_completion_tokens"] = limit
    if _LOGPROBS in (json_body.optional(body, "include", list) or ()):
        made |= {"logprobs": True, "top_logprobs": json_body.optional(body, "top_logprobs", int) or 0}
    text = json_body.optional(body, "text", dict) or {}
    json_body.known_keys(text, frozenset(("format", "verbosity")), "text")
    form = json_body.optional(text, "format", dict, "text.format")
    kind = "text" if form is None else json_body.required(form, "type", str, "text.format.type")
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError.unknown_value("text.format.type", kind, ("text", "json_object", "json_schema"))
    if form is not None and body.get("structured_outputs") is not None:
        message = "An answer has one form: set 'structured_outputs' or 'text.format'."
        raise RequestError.invalid(message, param="structured_outputs", code="invalid_value")
    if kind == "json_object":
        made["response_format"] = {"type": kind}
    elif kind == "json_schema":
        assert form is not None
        json_body.known_keys(form, words("type name schema strict description"), "text.format")
        json_body.required(form, "schema", dict, "text.format.schema")
        json_body.required(form, "name", str, "text.format.name")
        schema = {name: value for name, value in form.items() if name != "type" and value is not None}
        made["response_format"] = {"type": kind, "json_schema": schema}
    return made


def _reasoning(body: Object) -> Object:
    reasoning = json_body.optional(body, "reasoning", dict) or {}
    effort = reasoning.get("effort")
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise RequestError.unknown_value("reasoning.effort", effort, _EFFORTS)
    return {"reasoning_effort": effort}


def _tools(body: Object, parses_tools: bool) -> Object:
    """Return the fields of a chat about tools.

    vLLM's responses show tools also where it has no parser for their calls; its chats do so with the choice ``none``.
    """
    choice = body.get("tool_choice") or "auto"
    named = isinstance(choice, dict) and choice.get("type") == "function"
    if not named and choice not in ("auto", "none", "required"):
        raise _NotModelledError("tool_choice")
    tools = json_body.objects(body, "tools")
    if not tools:
        if named or choice == "required":
            raise RequestError.missing("tools")
        return {}
    made = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    if choice == "auto" and not parses_tools:
        choice = "none"
    if isinstance(choice, dict):
        name = json_body.required(choice, "name", str, "tool_choice.name")
        choice = {"type": "function", "function": {"name": name}}
    return {"tools": made, "tool_choice": choice}


def _tool(tool: Object, path: str) -> Object:
    if json_body.required(tool, "type", str, f"{path}.type") != "function":
        raise _NotModelledError(f"{path}.type")
    json_body.known_keys(tool, TOOL_FIELDS, path)
    function: Object = {"name": json_body.required(tool, "name", str, f"{path}.name")}
    for name, kind in (("description", str), ("parameters", dict), ("strict", bool), ("defer_loading", bool)):
        if (value := json_body.optional(tool, name, kind, f"{path}.{name}")) is not None:
            function[name] = value
    return {"type": "function", "function": function}
