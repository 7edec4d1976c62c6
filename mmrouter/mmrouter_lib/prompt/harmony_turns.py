"""Chats -> turns of the Harmony format of gpt-oss, by the rules of vLLM 0.32's front end.

What a turn holds is decided here; how it is written is decided by :mod:`mmrouter_lib.prompt.harmony`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from mmrouter_lib.families import NotModelledError
from mmrouter_lib.prompt.templates import TemplateError

Channel = Literal["analysis", "commentary", "final"]
CHANNELS: Final[tuple[Channel, ...]] = ("analysis", "commentary", "final")
Content = str | list[str] | None
_INSTRUCTING = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn: its author, the channel of what is no question, and its texts, each of which is tokenized alone.

    ``author``: a role, or of the result of a tool the function. ``calls``: the function that the turn calls. The text
    of a developer's turn is the instructions.
    """

    author: str
    texts: tuple[str, ...]
    channel: Channel | None = None
    calls: str | None = None


def instructions_of(messages: Sequence[Mapping[str, Any]]) -> tuple[str | None, Sequence[Mapping[str, Any]]]:
    """Return the text of a system or developer message at the front, and the messages after it."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise TemplateError("messages must be a list of at least one message")
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f"messages[{at}] must be an object with a role")
    if messages[0]["role"] not in _INSTRUCTING:
        return None, messages
    return _joined(_content(messages[0])), messages[1:]


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Return the turns of the messages after the instructions, without reasoning that an answer followed.

    Raises :class:`TemplateError` for a role that the format lacks, which the engine answers with 400, and
    :class:`NotModelledError` for anything but texts and complete calls of functions.
    """
    functions = {call["id"]: call["function"]["name"] for message in messages for call in _calls(message)}
    made = [turn for message in messages for turn in _turns(message, functions)]
    answers = [at for at, turn in enumerate(made) if turn.channel == "final"]
    last = answers[-1] if answers else 0
    return [turn for at, turn in enumerate(made) if at >= last or turn.channel != "analysis"]


def _turns(message: Mapping[str, Any], functions: Mapping[str, str]) -> Iterator[Turn]:
    role, content = message["role"], _content(message)
    texts = tuple(content) if isinstance(content, list) else (content or "",)
    match role:
        case "assistant":
            reasoning, calls = _reasoning(message), _calls(message)
            if calls and (text := _joined(content)):
                yield Turn(role, (text,), "commentary")
            if reasoning:
                yield Turn(role, (reasoning,), "analysis")
            for call in calls:
                yield Turn(role, (call["function"]["arguments"],), "commentary", calls=call["function"]["name"])
            if not calls and texts[0]:  # later parts of an answer whose first part is empty are lost
                yield Turn(role, texts, "final")
        case "tool":
            name = functions.get(_answered(message), "")
            yield Turn(f"functions.{name}", (_joined(content) or "",), "commentary")
        case "user":
            yield Turn(role, texts)
        case "system" | "developer":
            if (text := _joined(content)) is not None:
                yield Turn("developer", (text,))
        case _:
            raise TemplateError(f"the Harmony format has no role {role!r}")


def _content(message: Mapping[str, Any]) -> Content:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:  # the engine reads an empty list as no content or as an empty one
        raise NotModelledError("a message's content is neither a text nor a list of parts")
    return [_text(part) for part in content]


def _text(part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise NotModelledError("a part is no text")
    return str(part["text"])


def _joined(content: Content) -> str | None:
    return "".join(content) if isinstance(content, list) else content


def _reasoning(message: Mapping[str, Any]) -> str:
    found = message.get("reasoning")
    if found is None:
        found = message.get("reasoning_content")
    if not (found is None or isinstance(found, str)):
        raise NotModelledError("reasoning is no text")
    return found or ""


def _answered(message: Mapping[str, Any]) -> str:
    name = message.get("tool_call_id")
    if not (name is None or isinstance(name, str)):
        raise NotModelledError("the id of a call is no text")
    return name or ""


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the calls of an answer, all of which are complete."""
    calls = message.get("tool_calls")
    if message["role"] != "assistant":
        if "tool_calls" in message:
            raise NotModelledError("a message that is no answer has tool_calls")
        return ()
    if not (calls is None or isinstance(calls, list)) or not all(map(_is_complete, calls or ())):
        raise NotModelledError("tool_calls are no complete calls of functions")
    return calls or ()


def _is_complete(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type") != "function":
        return False
    return all(isinstance(value, str) for value in (call.get("id"), function.get("name"), function.get("arguments")))
