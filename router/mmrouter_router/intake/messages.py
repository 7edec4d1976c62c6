"""Parser for the body of Anthropic's ``POST /v1/messages``, which becomes a chat: one prompt and one way to engines.

It is converted as vLLM 0.32 converts it (``AnthropicServingMessages``), so the prompt is the one that vLLM's own
``/v1/messages`` renders. vLLM's endpoint takes no identities of images, so engines get the chat.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final, NamedTuple, Self

import orjson

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.request_fields import CHAT, MESSAGES, words
from mmrouter_lib.prompt import AnyPrompter, HarmonyPrompter, Prompter
from mmrouter_lib.prompt.message_traits import EFFORTS, effort_without_thinking, wants_system_first
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import json_body
from mmrouter_router.intake.chat import parse_unextracted
from mmrouter_router.intake.field_check import check_fields
from mmrouter_router.intake.json_body import Object, Raw, Served
from mmrouter_router.intake.request import PLACEHOLDER, ChatRequest, ImagePart, InlineImage, Limits, decoded_image

COUNT_TOKENS: Final = "/v1/messages/count_tokens"

_BILLING: Final = "x-anthropic-billing-header"  # such a text differs in every request, so vLLM leaves it out
BLOCKS: Final = {
    "text": words("type text cache_control citations"),
    "image": words("type source cache_control"),
    "tool_use": words("type id name input cache_control caller"),
    "tool_result": words("type tool_use_id content is_error cache_control"),
    "thinking": words("type thinking signature cache_control"),
    "redacted_thinking": words("type data cache_control"),
}
"""Type of a content block -> its fields."""
_SOURCES: Final = {"base64": words("type media_type data"), "url": words("type url")}
TOOL_FIELDS: Final = words(
    "type name description input_schema strict defer_loading cache_control allowed_callers eager_input_streaming",
    "input_examples",
)
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none", "tool": ""}
_COPIED: Final = ("stream", "temperature", "top_p", "top_k", "watermarking", "chat_template_kwargs", "vllm_xargs")


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What vLLM finds out about its chat template before it converts a request.

    ``system_first``: the template refuses a system message behind the first, so all become one. ``no_thinking``:
    returns the effort by which thinking is disabled; may be slow.
    """

    system_first: bool = True
    no_thinking: Callable[[], str] = lambda: "none"

    @classmethod
    def of(cls, prompter: AnyPrompter | None) -> Self:
        """Return the traits of a model's templates; the defaults suit every template."""
        if isinstance(prompter, HarmonyPrompter):
            return cls(no_thinking=lambda: "low")  # the format refuses ``none``
        if not isinstance(prompter, Prompter):
            return cls()
        return cls(wants_system_first(prompter.templates), cache(partial(effort_without_thinking, prompter)))


def parse_messages(
    raw: Raw,
    limits: Limits,
    served: Served,
    engine: EngineType = "vllm",
    *,
    traits: TemplateTraits,
    counts: bool = False,
) -> ChatRequest:
    """Parse a message request and return its chat. ``counts``: it is for :data:`COUNT_TOKENS`, without an answer.

    Raises :class:`RequestError` only.
    """
    body = json_body.parse_object(raw, limits.max_request_bytes)
    json_body.model_of(body, served)
    check_fields(body, MESSAGES, engine)
    conversion = _Conversion(limits, traits)
    chat = conversion.chat(body, engine, counts=counts)
    request = parse_unextracted(orjson.dumps(chat), limits, served, engine)
    steering = [name for name in adapter(engine).removed_fields if name in body]
    images = tuple(conversion.images[part.url].named(part) for part in request.images)
    return replace(request, images=images, removed=(*request.removed, *steering))


class _Image(NamedTuple):
    """An image of a request: its field, and its bytes or its URL."""

    param: str
    inline: InlineImage | None
    url: str

    def named(self, part: ImagePart) -> ImagePart:
        return replace(part, param=self.param, inline=self.inline, url=self.url, in_source=False)


class _Conversion:
    """One request's conversion. ``images``: by the placeholder that stands for each in the chat.

    Their order is not that of the chat, where results of tools stand before the rest of their message.
    """

    def __init__(self, limits: Limits, traits: TemplateTraits) -> None:
        self._limits, self._traits = limits, traits
        self.images: dict[str, _Image] = {}
        self._messages: list[Object] = []

    def chat(self, body: Object, engine: EngineType, *, counts: bool) -> Object:
        messages = json_body.objects(body, "messages")
        if not messages:
            raise RequestError.missing("messages")
        system = [*_system_texts(body.get("system"), "system")]
        for number, message in enumerate(messages):
            if self._traits.system_first and message.get("role") == "system":
                system += _system_texts(message.get("content"), f"messages[{number}].content")
        if system:
            self._messages.append({"role": "system", "content": "".join(system)})
        for number, message in enumerate(messages):
            self._message(message, f"messages[{number}]")
        chat: Object = {"model": body["model"], "messages": self._messages}
        chat |= {name: body[name] for name in _COPIED if body.get(name) is not None}
        chat |= _answer_limits(body, counts=counts)
        chat |= self._reasoning(body, engine, chat.get("max_tokens"))
        return chat | _tools(body)

    def _message(self, message: Object, path: str) -> None:
        json_body.known_keys(message, frozenset(("role", "content")), path)
        role = json_body.required(message, "role", str, f"{path}.role")
        if role not in ("user", "assistant", "system"):
            raise RequestError.unknown_value(f"{path}.role", role, ("user", "assistant", "system"))
        content = message.get("content")
        if role == "system":
            texts = [*_system_texts(content, f"{path}.content")]
            if texts and not self._traits.system_first:
                self._messages.append({"role": "system", "content": "".join(texts)})
            return
        made: Object = {"role": role}
        if isinstance(content, str):
            made["content"] = content
        else:
            made |= self._content(_blocks(content, f"{path}.content"), role)
        if role != "user" or "content" in made:
            self._messages.append(made)

    def _content(self, blocks: Iterator[tuple[str, str, Object]], role: str) -> Object:
        """Return the fields of a message with these blocks. Results of tools become messages before it."""
        parts: list[Object] = []
        calls: list[Object] = []
        reasoning: list[str] = []
        for kind, path, block in blocks:
            if kind == "text":
                if text := json_body.required(block, "text", str, f"{path}.text"):
                    parts.append({"type": "text", "text": text})
            elif kind == "image":
                parts.append(self._image(block, path))
            elif kind == "thinking":
                reasoning.append(json_body.required(block, "thinking", str, f"{path}.thinking"))
            elif kind == "tool_use":
                arguments = json.dumps(json_body.optional(block, "input", dict, f"{path}.input") or {})
                name = json_body.required(block, "name", str, f"{path}.name")
                call = json_body.required(block, "id", str, f"{path}.id")
                calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": arguments}})
            elif kind == "tool_result" and role == "user":
                self._result(block, path)
            elif kind == "tool_result":
                raise json_body.unsupported(path, "results of tools belong to messages of the user")
        made: Object = {"reasoning": "".join(reasoning)} if reasoning else {}
        if calls:
            made["tool_calls"] = calls
        if parts:
            made["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
        return made

    def _result(self, block: Object, path: str) -> None:
        content = block.get("content")
        texts = [content] if isinstance(content, str) else []
        pictures: list[Object] = []
        for kind, place, item in _blocks(content, f"{path}.content") if isinstance(content, list) else ():
            if kind == "text":
                texts.append(json_body.required(item, "text", str, f"{place}.text"))
            elif kind == "image":
                pictures.append(self._image(item, place))
            else:
                raise RequestError.unknown_part(f"{place}.type", kind, ("text", "image"))
        call = json_body.required(block, "tool_use_id", str, f"{path}.tool_use_id")
        self._messages.append({"role": "tool", "tool_call_id": call, "content": "\n".join(texts)})
        if pictures:
            self._messages.append({"role": "user", "content": pictures})

    def _image(self, block: Object, path: str) -> Object:
        source = json_body.required(block, "source", dict, f"{path}.source")
        kind = json_body.required(source, "type", str, f"{path}.source.type")
        if kind not in _SOURCES:
            raise RequestError.unknown_value(f"{path}.source.type", kind, tuple(_SOURCES))
        json_body.known_keys(source, _SOURCES[kind], f"{path}.source")
        name = "data" if kind == "base64" else "url"
        param = f"{path}.source.{name}"
        value = json_body.required(source, name, str, param)
        placeholder, inline = f"{PLACEHOLDER}{len(self.images)}", None
        if kind == "base64":
            inline = decoded_image(value)
            if inline is None:
                message = "The image is not valid base64."
                raise RequestError.invalid(message, param=param, code="media_data_uri")
            value = placeholder
        self.images[placeholder] = _Image(param, inline, value)
        json_body.count_media(len(self.images), self._limits.max_images, param)
        return {"type": "image_url", "image_url": {"url": placeholder}}

    def _reasoning(self, body: Object, engine: EngineType, max_tokens: Any) -> Object:
        made: Object = {}
        config = json_body.optional(body, "output_config", dict) or {}
        json_body.known_keys(config, frozenset(("effort", "format")), "output_config")
        if (form := json_body.optional(config, "format", dict, "output_config.format")) is not None:
            schema = json_body.required(form, "schema", dict, "output_config.format.schema")
            made["response_format"] = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
        if (effort := config.get("effort")) is not None:
            if effort not in EFFORTS:
                raise RequestError.unknown_value("output_config.effort", effort, EFFORTS)
            made["reasoning_effort"] = effort
        thinking = json_body.optional(body, "thinking", dict) or {}
        kind = thinking.get("type")
        if kind == "disabled":
            made["reasoning_effort"] = self._traits.no_thinking()
        elif kind == "enabled":
            budget = json_body.required(thinking, "budget_tokens", int, "thinking.budget_tokens")
            if max_tokens is not None and budget >= max_tokens:
                message = "'thinking.budget_tokens' must be less than 'max_tokens'."
                raise RequestError.invalid(message, param="thinking.budget_tokens", code="invalid_value")
            if adapter(engine).request_fields[CHAT].knows("thinking_token_budget"):
                made["thinking_token_budget"] = budget
        elif thinking and kind != "adaptive":
            raise RequestError.unknown_value("thinking.type", kind, ("enabled", "disabled", "adaptive"))
        return made


def _blocks(content: Any, path: str) -> Iterator[tuple[str, str, Object]]:
    """Yield type, path and block of a message's content."""
    if not isinstance(content, list):
        raise RequestError.wrong_type(path, "a string or an array of content blocks", content)
    for number, block in enumerate(content):
        place = f"{path}[{number}]"
        if not isinstance(block, dict):
            raise RequestError.wrong_type(place, "an object", block)
        kind = json_body.required(block, "type", str, f"{place}.type")
        if kind not in BLOCKS:
            raise RequestError.unknown_part(f"{place}.type", kind, tuple(BLOCKS))
        json_body.known_keys(block, BLOCKS[kind], place)
        yield kind, place, block


def _system_texts(content: Any, path: str) -> Iterator[str]:
    """Yield the texts of a system prompt."""
    if isinstance(content, str):
        if content and (path == "system" or not content.startswith(_BILLING)):
            yield content
        return
    for kind, place, block in _blocks(content, path) if content is not None else ():
        if kind != "text":
            raise RequestError.unknown_part(f"{place}.type", kind, ("text",))
        text = json_body.required(block, "text", str, f"{place}.text")
        if text and not text.startswith(_BILLING):
            yield text


def _answer_limits(body: Object, *, counts: bool) -> Object:
    if counts:
        return {}
    limit = json_body.required(body, "max_tokens", int)
    stop = json_body.optional(body, "stop_sequences", list)
    made: Object = {"max_tokens": limit, **({"stop": stop} if stop else {})}
    return made | ({"stream_options": {"include_usage": True}} if body.get("stream") else {})


def _tools(body: Object) -> Object:
    """Return the fields of a chat about tools."""
    choice = json_body.optional(body, "tool_choice", dict) or {}
    kind = choice.get("type", "auto")
    if kind not in tuple(_CHOICES):  # a list or an object has no hash
        raise RequestError.unknown_value("tool_choice.type", kind, tuple(_CHOICES))
    tools = json_body.objects(body, "tools")
    if not tools:
        if kind in ("any", "tool"):
            raise RequestError.missing("tools")
        return {}
    made: Object = {"tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]}
    made["tool_choice"] = _CHOICES[kind]
    if kind == "tool":
        name = json_body.required(choice, "name", str, "tool_choice.name")
        made["tool_choice"] = {"type": "function", "function": {"name": name}}
    if choice:
        made["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    return made


def _tool(tool: Object, path: str) -> Object:
    if tool.get("type", "custom") != "custom":
        raise json_body.unsupported(f"{path}.type", "engines run no tools of their own")
    json_body.known_keys(tool, TOOL_FIELDS, path)
    schema = json_body.required(tool, "input_schema", dict, f"{path}.input_schema")
    function: Object = {"name": json_body.required(tool, "name", str, f"{path}.name")}
    for name, kind in (("description", str), ("strict", bool), ("defer_loading", bool)):
        if (value := json_body.optional(tool, name, kind, f"{path}.{name}")) is not None:
            function[name] = value
    function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
    return {"type": "function", "function": function}
