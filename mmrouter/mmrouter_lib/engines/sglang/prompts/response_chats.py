"""The chat that SGLang 0.5.23 makes of a request to ``/v1/responses`` (docs/engine-facts/sglang.md#responses).

Compared with the engine's own code by ``tests/conformance/sglang/test_responses.py``.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmrouter_lib.engines.base.response_chat import (
    Object,
    ResponseChat,
    UnmodelledFieldError,
    as_list,
    as_object,
    as_text,
)

_LABEL: Final = "Developer instructions:"
_TEXTS: Final = ("input_text", "output_text", "text")
_IMAGES: Final = ("input_image", "image_url")
_ROLES: Final = ("user", "assistant", "system", "developer")
_MESSAGE_FIELDS: Final = frozenset({"type", "role", "content", "id", "status"})
_LATER: Final = "a system message behind the first one"
_PROBE: Final = [
    {"role": role, "content": text} for role, text in zip(("system", "user") * 2, ("t", "t", _LATER, "t"), strict=True)
]


def shows_later_systems(template: str) -> bool:
    """Return whether a template shows a system message behind the first one, as the engine finds it out.

    It renders a probe in a plain environment: a template that needs more than that counts as one that does not.
    """
    try:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        return _LATER in environment.from_string(template).render(messages=_PROBE, add_generation_prompt=False)
    except Exception:  # a template is a program, which may raise anything
        return False


def chat_of(body: Mapping[str, Any], *, later_systems: bool) -> ResponseChat:
    """Return the chat of a request. ``later_systems``: :func:`shows_later_systems` of the model's template.

    Raises :class:`UnmodelledFieldError`.
    """
    if body.get("previous_response_id") is not None:
        raise UnmodelledFieldError("previous_response_id")
    messages: list[Object] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": as_text(instructions, "instructions")})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for number, item in enumerate(as_list(items, "input")):
        if (message := _message(as_object(item, f"input[{number}]"), f"input[{number}]")) is not None:
            messages.append(message)
    messages = _joined(messages)
    if not later_systems:
        messages = _systems_first(messages)
    if not messages:
        raise UnmodelledFieldError("input")
    chat = {"messages": messages, **_tools(body), **_reasoning(body)}
    if (variables := body.get("chat_template_kwargs")) is not None:
        chat["chat_template_kwargs"] = as_object(variables, "chat_template_kwargs")
    return ResponseChat(chat, list(_images(messages)))


def _images(messages: list[Object]) -> Iterable[tuple[int, int, Object]]:
    """Yield the images, and give their parts the form that they have in a chat."""
    for at, message in enumerate(messages):
        for number, part in enumerate(message.get("content") or ()):
            if isinstance(part, dict) and part["type"] == "image_url":
                yield at, number, part["image_url"]
                part["image_url"] = {"url": ""}


def _message(item: Object, path: str) -> Object | None:
    """Return the message of an item, ``None`` where the engine leaves it out."""
    match item.get("type"):
        case None | "message":
            return _spoken_message(item, path)
        case "reasoning":
            return _reasoning_message(item, path)
        case "function_call":
            function = {
                "name": as_text(item.get("name"), f"{path}.name"),
                "arguments": _arguments(item.get("arguments")),
            }
            if item.get("namespace"):
                raise UnmodelledFieldError(f"{path}.namespace")
            name = item.get("call_id") or item.get("id")
            call = {"id": None if name is None else as_text(name, f"{path}.call_id"), "type": "function"}
            return {"role": "assistant", "tool_calls": [{**call, "function": function}]}
        case "function_call_output":
            output, name = item.get("output", ""), item.get("call_id")
            if not isinstance(output, str):  # pictures of a result reach no prompt
                parts = [part for part in as_list(output, f"{path}.output") if isinstance(part, dict)]
                output = "".join(as_text(part.get("text", ""), f"{path}.output") for part in parts)
            call = {} if name is None else {"tool_call_id": as_text(name, f"{path}.call_id")}
            return {"role": "tool", "content": output, **call}
    raise UnmodelledFieldError(f"{path}.type")


def _arguments(value: Any) -> str:
    """Return the arguments of a call as the text of a JSON object: what is none becomes an empty one."""
    if isinstance(value, dict):
        return orjson.dumps(value).decode()
    try:
        return value if isinstance(value, str) and isinstance(orjson.loads(value), dict) else "{}"
    except orjson.JSONDecodeError:
        return "{}"


def _reasoning_message(item: Object, path: str) -> Object | None:
    for name in ("summary", "content"):
        parts = [part for part in as_list(item.get(name) or [], f"{path}.{name}") if isinstance(part, dict)]
        if texts := [as_text(part["text"], f"{path}.{name}") for part in parts if part.get("text")]:
            return {"role": "assistant", "reasoning_content": "\n".join(texts)}
    if item.get("encrypted_content"):
        raise UnmodelledFieldError(f"{path}.encrypted_content")
    return None


def _spoken_message(item: Object, path: str) -> Object:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise UnmodelledFieldError(f"{path}.role")
    if others := sorted(name for name in item.keys() - _MESSAGE_FIELDS if item[name] is not None):
        raise UnmodelledFieldError(f"{path}.{others[0]}")
    if not isinstance(content, str):
        parts = enumerate(as_list(content, f"{path}.content"))
        content = [_part(as_object(part, f"{path}.content"), f"{path}.content[{number}]") for number, part in parts]
    if role == "developer":
        role, content = "system", _labelled(content)
    return {"role": role, "content": content}


def _part(part: Object, path: str) -> Object:
    kind = part.get("type")
    if kind in _TEXTS:
        return {"type": "text", "text": as_text(part.get("text", ""), f"{path}.text")}
    if kind not in _IMAGES:
        raise UnmodelledFieldError(f"{path}.type")
    if not isinstance(part.get("image_url"), str | dict):
        raise UnmodelledFieldError(f"{path}.image_url")
    return {"type": "image_url", "image_url": part}


def _labelled(content: str | list[Object]) -> str | list[Object]:
    if isinstance(content, str):
        return f"{_LABEL}\n{content}"
    for at, part in enumerate(content):
        if part["type"] == "text":
            return [*content[:at], {**part, "text": f"{_LABEL}\n{part['text']}"}, *content[at + 1 :]]
    return [{"type": "text", "text": _LABEL}, *content]


def _joined(messages: list[Object]) -> list[Object]:
    """Return the messages with each run of the assistant's as one."""
    joined: list[Object] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if not message["role"] == last.get("role") == "assistant":
            joined.append(message)
            continue
        before, content = last.get("content"), message.get("content")
        if content is not None and content != "":
            if before is None or before == "":
                last["content"] = content
            elif isinstance(before, str) and isinstance(content, str):
                last["content"] = f"{before}\n\n{content}"
            else:
                last["content"] = _parts(before) + _parts(content)
        if calls := message.get("tool_calls"):
            last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
        if thought := message.get("reasoning_content"):
            earlier = last.get("reasoning_content")
            last["reasoning_content"] = f"{earlier}\n{thought}" if earlier else thought
    return joined


def _parts(content: str | list[Object]) -> list[Object]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _systems_first(messages: list[Object]) -> list[Object]:
    """Return the messages with all texts of system messages as one in front."""
    texts: list[str] = []
    for content in (message["content"] for message in messages if message["role"] == "system"):
        texts += [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others


def _reasoning(body: Mapping[str, Any]) -> Object:
    reasoning = body.get("reasoning")
    if reasoning is None:
        return {}
    if as_object(reasoning, "reasoning").get("reasoning_effort") is not None:
        raise UnmodelledFieldError("reasoning.reasoning_effort")
    effort = reasoning.get("effort", "medium")
    return {} if effort is None else {"reasoning_effort": effort}


def _tools(body: Mapping[str, Any]) -> Object:
    """Return the fields of a chat about tools: of types that the engine has itself the prompt shows none."""
    tools: list[Object] = []
    for number, tool in enumerate(as_list(body.get("tools") or [], "tools")):
        kind = as_object(tool, f"tools[{number}]").get("type")
        if kind in ("custom", "namespace"):
            raise UnmodelledFieldError(f"tools[{number}].type")
        if kind == "function":
            function = {name: tool.get(name) for name in ("name", "description", "parameters")}
            tools.append({"type": "function", "function": {**function, "strict": tool.get("strict", False)}})
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict):
        name = choice.get("name") or as_object(choice.get("function") or {}, "tool_choice.function").get("name")
        named = choice.get("type") == "function" and name
        choice = {"type": "function", "function": {"name": name}} if named else "auto"
    elif choice not in ("auto", "none", "required"):
        raise UnmodelledFieldError("tool_choice")
    return {"tools": tools, "tool_choice": choice} if tools else {}
