"""The part of a chat request that SGLang 0.5.23 passes to its chat template (docs/engine-facts/sglang.md#prompts)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from mmrouter_lib.engines.sglang.prompts.tool_schemas import shown_tools
from mmrouter_lib.families import NotModelledError
from mmrouter_lib.prompt.templates import ContentFormat, TemplateError, loops_over_content

_SHOWS_MEDIA = ("image", "audio", "video", "vision")
"""A template with one of these words gets contents as parts, any other one texts, and then images are dropped."""
_MESSAGE_NAMES = ("message", "msg", "m")
_ARGUMENTS = ("conversation", "tools", "add_generation_prompt", "tokenize", "return_dict")
"""Names that the engine passes itself: a second value in ``chat_template_kwargs`` is an error."""
_LOW_EFFORT = ("low_effort", "truncate_history_thinking")  # a template with both gets the first for a low effort
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
_TRUE = frozenset({"1", "true", "yes", "y", "on"})
_FIELDS = ("role", "content", "tool_call_id", "name", "reasoning_content", "tool_calls")
"""Fields of a message that reach the template, in their order; of a user's message the first two alone."""


class ShownChat(NamedTuple):
    """What a template is given. ``tail``: the text of a final message that is continued behind the prompt, else empty.

    ``tools``: in OpenAI's form, ``None`` without any; a template that fails on them gets their functions alone.
    """

    messages: list[dict[str, Any]]
    tail: str
    variables: dict[str, Any]
    tools: list[dict[str, Any]] | None

    @property
    def functions(self) -> list[dict[str, Any]] | None:
        """The functions of the tools."""
        return None if self.tools is None else [tool["function"] for tool in self.tools]


def content_format(source: str) -> ContentFormat:
    """Return how the engine passes contents to a template."""
    in_parts = any(word in source for word in _SHOWS_MEDIA) or loops_over_content(source, _MESSAGE_NAMES)
    return "openai" if in_parts else "string"


def shown_chat(body: Mapping[str, Any], source: str, content: ContentFormat) -> ShownChat:
    """Return what a template, whose text is ``source``, is given of a chat request's body.

    Raises :class:`TemplateError` for what the engine refuses, :class:`NotModelledError`.
    """
    given = body.get("messages")
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise TemplateError("messages must be a list of at least one message")
    if "tool_call_id" in source and _has_reordered_media(given):
        raise NotModelledError("results of tools with images are not in the order of the calls")
    chat = [_message(message, f"messages[{at}]", content) for at, message in enumerate(given)]
    tail = ""
    last = chat[-1]["content"] if chat[-1]["role"] == "assistant" else None
    if isinstance(last, str):
        if body.get("continue_final_message"):
            chat, tail = chat[:-1], last
        else:
            chat[-1] = {"role": "user", "content": last}
    variables = template_variables(body)
    if variables.get("reasoning_effort") == "low" and all(name in source for name in _LOW_EFFORT):
        raise NotModelledError("the engine adds a variable of the template")
    return ShownChat(chat, tail, variables, shown_tools(body.get("tools"), body.get("tool_choice")))


def template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables of a chat request: ``chat_template_kwargs`` and what its reasoning fields set.

    Raises :class:`TemplateError` for values that the engine refuses.
    """
    given = body.get("chat_template_kwargs")
    if not (given is None or isinstance(given, Mapping)):
        raise TemplateError("chat_template_kwargs must be an object")
    kwargs = dict(given or {})
    effort, thinking = reasoning(body)
    if thinking is not None:
        kwargs = {"thinking": thinking, "enable_thinking": thinking} | kwargs
    own = kwargs.pop("reasoning_effort", None)
    effort = effort if own is None else own
    if refused := [name for name in _ARGUMENTS if name in kwargs]:
        raise TemplateError(f"chat_template_kwargs.{refused[0]} is not accepted")
    if kwargs.pop("continue_final_message", None):
        raise TemplateError("chat_template_kwargs.continue_final_message is not accepted")
    return kwargs if effort is None else {"reasoning_effort": effort, **kwargs}


def reasoning(body: Mapping[str, Any]) -> tuple[str | float | None, bool | None]:
    """Return the effort, and whether to think, that a request's reasoning fields set. Raises :class:`TemplateError`."""
    effort, reasoning, thinking = body.get("reasoning_effort"), body.get("reasoning"), None
    if isinstance(reasoning, Mapping):
        named = reasoning.get("effort")
        named = reasoning.get("reasoning_effort") if named is None else named
        effort = effort if named is None else named
        enabled = reasoning.get("enabled")
        enabled = reasoning.get("enable", False) if enabled is None else enabled
        thinking = True if (enabled.strip().lower() in _TRUE if isinstance(enabled, str) else enabled) else None
    if effort is None:
        return None, thinking
    effort = _effort(effort)
    return effort, effort != "none"


def _effort(value: Any) -> str | float:
    if isinstance(value, str) and value in _EFFORTS:
        return value
    try:
        if not isinstance(value, bool) and 0 <= (number := float(value)) <= 0.99:
            return number
    except (TypeError, ValueError):
        pass
    raise TemplateError(f"reasoning_effort {value!r} is neither a known word nor a number from 0 to 0.99")


def _message(message: Mapping[str, Any], where: str, content: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
        raise TemplateError(f"{where} must be an object with a role")
    made = {
        name: message[name] for name in (_FIELDS[:2] if role == "user" else _FIELDS) if message.get(name) is not None
    }
    if calls := made.get("tool_calls"):
        parsed = role == "assistant"
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]", parsed=parsed) for at, call in enumerate(calls)]
    parts = made.get("content")
    if parts is None:
        return {"role": role, "content": ""} | made
    if isinstance(parts, str):
        return made
    del made["content"]  # it comes last then
    shown = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(parts)]
    texts = [part["text"] for part in shown if part["type"] == "text"]
    if content == "string" or (role == "tool" and len(texts) == len(parts)):
        return made | {"content": " ".join(texts)}
    return made | {"content": shown}


def _part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    match part.get("type"):
        case "text":
            return {"type": "text", "text": part["text"]}
        case "image_url" | "video_url" | "audio_url" as kind:
            return {"type": kind.removesuffix("_url")}
        case kind:
            raise TemplateError(f"{where}.type is {kind!r}, which is not supported")


def _call(call: object, where: str, *, parsed: bool) -> dict[str, Any]:
    """Return a tool call with all fields of the engine's model. Raises for ``arguments`` that are no JSON object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise TemplateError(f"{where} must be an object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and parsed:
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise TemplateError(f"{where}.function.arguments must be valid JSON") from error
        if not isinstance(arguments, dict):
            raise TemplateError(f"{where}.function.arguments must be a JSON object")
    named = {"name": function.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "index": call.get("index"), "type": "function", "function": named}


def _has_reordered_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether results of tools that hold media stand in another order than the calls, which the engine then restores.

    A wrong yes is safe, because the request is then served without a prediction.
    """
    places: dict[Any, int] = {}  # id of a call of the last message that is no result -> its first place
    reached, in_order = 0, True
    for message in messages:
        if message.get("role") != "tool":
            calls = message.get("tool_calls") or ()
            ids = [call.get("id") for call in calls]
            places = {ids[at]: at for at in reversed(range(len(ids))) if not isinstance(ids[at], list | dict)}
            reached, in_order = 0, True
            continue
        place = places.get(message.get("tool_call_id"), reached)
        in_order &= place >= reached
        reached = max(reached, place)
        if isinstance(message.get("content"), list) and not in_order:
            return True
    return False
