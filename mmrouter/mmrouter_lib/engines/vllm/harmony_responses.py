"""The chat of the same prompt that vLLM 0.32 makes of a request to ``/v1/responses`` for gpt-oss.

vLLM writes both in the Harmony format, but reads the items of the input differently from messages: an assistant's item
is always an answer, and a reasoning is its content without the summary. Compared with vLLM's own front end by
``tests/conformance/vllm/test_harmony.py``.
"""

from collections.abc import Mapping
from typing import Any, Final

from mmrouter_lib.engines.base.response_chat import (
    Object,
    ResponseChat,
    UnmodelledFieldError,
    as_list,
    as_object,
    as_text,
)

_EARLIER: Final = ("previous_response_id", "previous_input_messages")
_INSTRUCTING: Final = ("system", "developer")
_TEXTS: Final = ("input_text", "output_text", "text")
_SHOWN: Final = ("name", "description", "parameters")


def chat_of(body: Mapping[str, Any]) -> ResponseChat:
    """Return the chat of a request. Raises :class:`UnmodelledFieldError`."""
    for name in _EARLIER:
        if body.get(name):
            raise UnmodelledFieldError(name)
    if body.get("truncation", "disabled") != "disabled":
        raise UnmodelledFieldError("truncation")
    messages: list[Object] = []
    if (instructions := body.get("instructions")) is not None:
        messages.append({"role": "system", "content": as_text(instructions, "instructions")})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        _add_items(messages, as_list(given, "input"))
    if not messages:
        raise UnmodelledFieldError("input")
    return ResponseChat({"messages": messages, **_tools(body), **_effort(body)})


def _add_items(messages: list[Object], items: list[Any]) -> None:
    calls: dict[str, Object] = {}  # the last call of an id: an output answers the one before it
    for number, item in enumerate(items):
        path = f"input[{number}]"
        match as_object(item, path).get("type"):
            case None | "message":
                _add_message(messages, item, path, is_first=number == 0)
            case "reasoning":
                if text := _reasoning(item, path):
                    messages.append({"role": "assistant", "reasoning": text})
            case "function_call":
                function = {name: as_text(item.get(name), f"{path}.{name}") for name in ("name", "arguments")}
                call = {"id": str(number), "type": "function", "function": function}
                calls[as_text(item.get("call_id"), f"{path}.call_id")] = call
                messages.append({"role": "assistant", "tool_calls": [call]})
            case "function_call_output":
                answered = calls.get(as_text(item.get("call_id"), f"{path}.call_id"))
                if answered is None:
                    raise UnmodelledFieldError(f"{path}.call_id")
                output = as_text(item.get("output"), f"{path}.output")
                messages.append({"role": "tool", "tool_call_id": answered["id"], "content": output})
            case _:
                raise UnmodelledFieldError(f"{path}.type")


def _add_message(messages: list[Object], item: Object, path: str, *, is_first: bool) -> None:
    role, content = item.get("role"), _content(item.get("content"), f"{path}.content")
    if role in _INSTRUCTING:
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        if not messages and not is_first:  # in front of a chat it would be its instructions
            raise UnmodelledFieldError(f"{path}.role")
        if text or not messages:
            messages.append({"role": role, "content": text})
    elif role == "user":
        messages.append({"role": role, "content": content})
    elif role == "assistant":
        if not (content if isinstance(content, str) else content[0]["text"]):  # a chat's turn without text is left out
            raise UnmodelledFieldError(f"{path}.content")
        messages.append({"role": role, "content": content})
    else:
        raise UnmodelledFieldError(f"{path}.role")


def _content(value: Any, path: str) -> str | list[Object]:
    if isinstance(value, str):
        return value
    parts: list[Object] = []
    for number, part in enumerate(as_list(value, path)):
        if as_object(part, f"{path}[{number}]").get("type") not in _TEXTS:
            raise UnmodelledFieldError(f"{path}[{number}].type")
        parts.append({"type": "text", "text": as_text(part.get("text"), f"{path}[{number}].text")})
    if not parts:
        raise UnmodelledFieldError(path)
    return parts


def _reasoning(item: Object, path: str) -> str:
    place = f"{path}.content"
    parts = as_list(item.get("content") or [], place)
    text = "\n".join(as_text(as_object(part, place).get("text"), place) for part in parts)
    if parts and not text:  # a chat's reasoning without text is left out
        raise UnmodelledFieldError(place)
    return text


def _effort(body: Mapping[str, Any]) -> Object:
    effort = as_object(body.get("reasoning") or {}, "reasoning").get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _tools(body: Mapping[str, Any]) -> Object:
    """Return the field of a chat about tools. Those that an engine has itself depend on its tool server."""
    tools: list[Object] = []
    for number, tool in enumerate(as_list(body.get("tools") or [], "tools")):
        if as_object(tool, f"tools[{number}]").get("type") != "function":
            raise UnmodelledFieldError(f"tools[{number}].type")
        tools.append({"type": "function", "function": {name: tool.get(name) for name in _SHOWN}})
    return {"tools": tools} if tools else {}
