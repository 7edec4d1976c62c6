"""Convert OpenAI chat messages to the conversation that a chat template gets, as vLLM 0.32 does.

The caller's objects are not modified; whatever a template gets is a copy. Media become ``{"type": "image"}`` and the
like, or, for a template that takes strings, text in front of their message.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mmrouter_lib.families import PlaceholderError
from mmrouter_lib.prompt.templates import ContentFormat, TemplateError

_TEXT_FIELD = dict.fromkeys(("text", "input_text", "output_text"), "text") | {
    name: name for name in ("refusal", "thinking")
}
_MODALITY = {"image_url": "image", "video_url": "video", "audio_url": "audio"} | {
    f"input_{name}": name for name in ("image", "audio")
}
_UNTYPED = ("image_url", "audio_url", "input_audio", "video_url")
"""Keys that decide the type of a part without ``type``, in vLLM's order."""

_PART_FIELDS = frozenset(
    {"type", "text", "refusal", "thinking", "closed", "name", "uuid", "data", "file", "prompt_cache_breakpoint"}
    | {"image_url", "image_pil", "image_embeds", "video_url", "video_embeds"}
    | {"audio_url", "audio_embeds", "input_audio"}
)
"""Fields of parts that vLLM handles; any other field of a part is passed to the template."""

_BILLING_LINE = "x-anthropic-billing-header"


def conversation(
    messages: Sequence[Mapping[str, Any]], content: ContentFormat, media_text: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the conversation for a template that takes ``content``; ``media_text`` maps modalities to plain text.

    ``{number}`` in such a text becomes the item's number, from 1, among those of its modality in all messages.
    Raises :class:`TemplateError` naming the message or part that cannot be used, :class:`PlaceholderError` for a text
    that contains the media text more often than its message has media.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise TemplateError("messages must be a list of at least one message")
    seen: Counter[str] = Counter()
    return [_message(message, f"messages[{at}]", content, media_text, seen) for at, message in enumerate(messages)]


def without_developer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn developer messages into system messages, and several system messages into one at the front."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    turned = [
        {**{k: v for k, v in m.items() if k != "tools"}, "role": "system"} if m["role"] == "developer" else m
        for m in messages
    ]
    system = [message for message in turned if message["role"] == "system"]
    if len(system) == 1 and turned[0]["role"] == "system":
        return turned
    texts = [text for text in (_plain(message.get("content", "")) for message in system) if text]
    return [{"role": "system", "content": "\n\n".join(texts)}, *(m for m in turned if m["role"] != "system")]


def normal_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools with the fields, order and empty values of the engine's request model.

    Templates print them as JSON, so all of these are part of the prompt. Raises :class:`TemplateError`.
    """
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]


def _message(
    message: Mapping[str, Any], where: str, content: ContentFormat, media_text: Mapping[str, str], numbers: Counter[str]
) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
        raise TemplateError(f"{where} must be an object with a role")
    parts = message.get("content")
    if parts is None:
        parts = []
    elif isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    elif not isinstance(parts, Sequence):
        raise TemplateError(f"{where}.content must be a text or a list of parts")
    if role == "system":
        parts = _without_billing(parts)
    converted = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(parts)]
    shown = [part for part in converted if part is not None]
    result: dict[str, Any] = {"role": role}
    result["content"] = shown if content == "openai" else _string(shown, where, media_text, numbers)
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls is not None and (not isinstance(calls, Sequence) or isinstance(calls, str)):
            raise TemplateError(f"{where}.tool_calls must be a list")
        if calls:
            result["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            result["reasoning"] = result["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        if isinstance(result["content"], list) and all(part.get("type") == "text" for part in shown):
            result["content"] = "\n".join(part.get("text", "") for part in shown)
    elif role == "developer":
        result["tools"] = message.get("tools")
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            result[field] = message[field]
    return result


def _part(part: object, where: str) -> dict[str, Any] | None:
    """Return a part for the template, ``None`` for a null text or refusal, which is skipped."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise TemplateError(f"{where} must be an object")
    kind = part.get("type")
    if kind is None:
        kind = next((key for key in _UNTYPED if key in part), None)
    extra = {key: value for key, value in part.items() if key not in _PART_FIELDS}
    if kind in _TEXT_FIELD:
        text = part.get(_TEXT_FIELD[kind])
        if text is None and kind in ("text", "refusal"):
            return None
        if not isinstance(text, str):
            raise TemplateError(f"{where}.{_TEXT_FIELD[kind]} must be a text")
        return {"type": "text", "text": text, **extra}
    if kind in _MODALITY:
        return {"type": _MODALITY[kind], **extra}
    if kind == "tool_reference":
        return {"type": "tool_reference", "name": part.get("name")}
    raise TemplateError(f"{where}.type is {kind!r}, which is not supported")


def _string(parts: list[dict[str, Any]], where: str, media_text: Mapping[str, str], numbers: Counter[str]) -> str:
    """Return the texts, after the media that they do not place; ``numbers`` counts each modality and is updated."""
    texts = [text for part in parts if (text := part.get("text") or part.get("name"))]
    joined = "\n".join(texts)
    wanted: dict[str, Counter[str]] = {}
    for part in parts:
        modality = part["type"]
        if modality not in ("text", "tool_reference"):
            if modality not in media_text:
                raise TemplateError(f"{where}: this model has no place for {modality} in its chat template")
            numbers[modality] += 1
            text = media_text[modality].replace("{number}", str(numbers[modality]))
            wanted.setdefault(modality, Counter())[text] += 1
    front: list[str] = []
    for text, count in [pair for texts_of in wanted.values() for pair in texts_of.items()]:
        missing = count - joined.count(text)
        if missing < 0:
            raise PlaceholderError(f"{where} holds {text!r} more often than it has images")
        front += [text] * missing
    return "\n".join([*front, joined] if joined else front)


def _call(call: object, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, empty for text that is no JSON object."""
    if not isinstance(call, Mapping):
        raise TemplateError(f"{where} must be an object")
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise TemplateError(f"{where} must be of type function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
        except RecursionError as error:
            raise TemplateError(f"{where}.function.arguments is nested too deeply") from error
    named = {**function, "arguments": dict(arguments) if isinstance(arguments, Mapping) else {}}
    return _ordered(("id", "function", "type"), {**call, "function": _ordered(("arguments", "name"), named)})


def _tool(tool: object, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError(f"{where} must be an object with a function that has a name")
    deferred = tool.get("defer_loading")
    inner = {field: function.get(field) for field in ("name", "description", "parameters")}
    optional = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading", deferred)}
    inner |= {field: value for field, value in optional.items() if value is not None}
    result: dict[str, Any] = {"type": tool.get("type", "function"), "function": inner}
    return result if deferred is None else {**result, "defer_loading": deferred}


def _ordered(first: tuple[str, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the engine's request model in its order, then the others in theirs."""
    return {key: values[key] for key in first if key in values} | {k: v for k, v in values.items() if k not in first}


def _without_billing(parts: Sequence[Any]) -> list[Any]:
    """Drop the billing line of some clients from system texts, as vLLM does: it differs in every request."""
    result: list[Any] = []
    for part in parts:
        typed = isinstance(part, Mapping) and part.get("type") == "text"
        text = part.get("text") if typed else part
        if not isinstance(text, str) or not text.startswith(_BILLING_LINE):
            result.append(part)
        elif rest := text.partition("\n")[2]:
            result.append({**part, "text": rest} if typed else rest)
    return result


def _plain(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part, Mapping) and "text" in part)
    return content if isinstance(content, str) else ""
