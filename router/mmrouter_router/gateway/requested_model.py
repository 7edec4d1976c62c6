"""What the gateway reads of a request: its model, and for a split its conversation. Pure.

A body is passed on as it came unless an alias replaces its model; it is then written anew, as routers do for engines.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson
from blake3 import blake3

from mmrouter_lib.engines.base.passed_routes import GENERATE, TRANSCRIBE
from mmrouter_router.core.errors import RequestError
from mmrouter_router.gateway.model_routes import Choice, Routes, of_conversation
from mmrouter_router.http.engine_connection import Body
from mmrouter_router.intake import PARSERS
from mmrouter_router.intake.form_body import read_form, write_form
from mmrouter_router.intake.json_body import Object, Raw, parse_object, required
from mmrouter_router.intake.request import HEAD_CHARACTERS

PATHS: Final = PARSERS.keys() - {GENERATE}
"""Paths that are forwarded: those of a frontend whose bodies name a model."""


class Routed(NamedTuple):
    """A request for its deployment. ``content_type``: of a form that was written anew."""

    choice: Choice
    body: Body
    content_type: str | None = None


def routed(path: str, raw: Raw, routes: Routes, max_bytes: int) -> Routed:
    """Return where a request goes, and its body there. Raises :class:`RequestError`."""
    if path == TRANSCRIBE:
        return _routed_form(raw, routes, max_bytes)
    body = parse_object(raw, max_bytes)
    model = required(body, "model", str)
    choices = routes.choices(model)
    choice = choices[0] if len(choices) == 1 else of_conversation(model, choices, conversation(body))
    if choice.model == model:
        return Routed(choice, _unchanged(raw))
    body["model"] = choice.model
    return Routed(choice, orjson.dumps(body))


def _routed_form(raw: Raw, routes: Routes, max_bytes: int) -> Routed:
    """Route a form, whose file is a conversation of its own."""
    if len(raw) > max_bytes:
        raise RequestError.too_large(max_bytes)
    fields = read_form(raw)
    model = next((bytes(field.value).decode("utf-8", "replace") for field in fields if field.name == "model"), None)
    if model is None:
        raise RequestError.missing("model")
    choices = routes.choices(model)
    choice = choices[0] if len(choices) == 1 else of_conversation(model, choices, blake3(raw).digest())
    if choice.model == model:
        return Routed(choice, _unchanged(raw))
    renamed = [field._replace(value=choice.model.encode()) if field.name == "model" else field for field in fields]
    content_type, body = write_form(renamed)
    return Routed(choice, body, content_type)


def _unchanged(raw: Raw) -> Body:
    return raw if isinstance(raw, bytes) else (memoryview(raw),)


def conversation(body: Object) -> bytes:
    """Return a hash of what all requests of a conversation begin with.

    That is the client's own cache key, or the messages up to the first one of a user with what stands before them, or
    the beginning of a prompt. A conversation whose first messages change is another one, and so is every request
    without messages and prompt, such as a query with its documents.
    """
    own = body.get("prompt_cache_key")
    if isinstance(own, str) and own:
        return blake3(b"key:" + own.encode("utf-8", "replace")).digest()
    value = next((body[name] for name in ("messages", "input", "prompt") if body.get(name) is not None), None)
    if value is None:
        rest = {name: part for name, part in body.items() if name != "model"}
        return blake3(orjson.dumps(rest, option=orjson.OPT_SORT_KEYS)).digest()
    begin: Any = value
    if isinstance(value, str):
        # A text as ``input`` is the first message of a user in the requests that follow.
        begin = [["user", value]] if "input" in body else value[:HEAD_CHARACTERS]
    elif isinstance(value, list):
        begin = _first_messages(value) if value and isinstance(value[0], dict) else value[:HEAD_CHARACTERS]
    return blake3(orjson.dumps([_content(body.get("system")), body.get("instructions"), begin])).digest()


def _first_messages(messages: Sequence[Any]) -> list[list[Any]]:
    """Return role and content of the messages up to the first one of a user, or of the first message alone."""
    first = [message if isinstance(message, dict) else {} for message in messages]
    end = next((number for number, message in enumerate(first) if message.get("role") == "user"), 0)
    return [[message.get("role"), _content(message.get("content"))] for message in first[: end + 1]]


def _content(content: Any) -> Any:
    """Return content without what clients change in later requests: the mark of what to cache, which has no effect
    here, and a text that becomes a part to be marked.
    """
    if not isinstance(content, list):
        return content
    parts = [_unmarked(part) if isinstance(part, dict) else part for part in content]
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].get("type") in ("text", "input_text"):
        return parts[0].get("text")
    return parts


def _unmarked(part: Object) -> Object:
    return {name: value for name, value in part.items() if name != "cache_control"}
