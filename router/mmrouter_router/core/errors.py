"""Errors for clients in OpenAI's shape; ``param`` names a field as clients write it (``messages[2].content``)."""

import errno
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import orjson

SHOWN_CHARACTERS = 80
SHOWN_NAMES: Final = 64
RETRY: Final = {"Retry-After": "1"}  # seconds
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
OVERLOADED: Final = frozenset({"queue_full", "router_full", "rate_limited", "concurrency_limited"})
"""Codes of refusals under overload, which are counted by code."""

CONTEXT_LENGTH: Final = "context_length_exceeded"
"""OpenAI's code of a prompt that is too long, by which clients shorten a conversation."""
_ABOUT_CONTEXT: Final = re.compile(r"(?:context|model) length", re.IGNORECASE)
_PORT: Final = r"(?::\d{1,5})?"
# An address in brackets is bounded: an engine's message may quote a client's megabytes of them.
_IPV6: Final = r"\[(?=[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:)[0-9A-Fa-f:.]{2,45}\]"
_ADDRESS: Final = re.compile(rf"\b\d{{1,3}}(?:\.\d{{1,3}}){{3}}{_PORT}\b|{_IPV6}{_PORT}")

FieldOf = Callable[[int, Mapping[str, Any]], str | None]
"""Status and decoded error body of an engine -> the request field that the error is about."""


def is_exhausted(error: BaseException) -> bool:
    """Whether an error says that this process has no free memory or file descriptors."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _EXHAUSTED)


class RequestError(Exception):
    """An answer other than success: HTTP status, OpenAI error fields and extra response headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type = status, message, type
        self.param, self.code = param, code
        self.headers: dict[str, str] = dict(headers or {})

    def to_body(self) -> bytes:
        """Return the JSON body; invalid Unicode (from a header or a path) is replaced."""
        param = None if self.param is None else _unicode(self.param)
        error = {"message": _unicode(self.message), "type": self.type, "param": param, "code": self.code}
        return orjson.dumps({"error": error})

    def to_event(self) -> bytes:
        """Return the JSON of the event ``error`` in a stream of ``/v1/responses``."""
        return orjson.dumps({"type": "error", "code": self.code, "message": self.message, "param": self.param})

    @classmethod
    def invalid(cls, message: str, *, param: str | None = None, code: str | None = None) -> Self:
        return cls(400, message, param=param, code=code)

    @classmethod
    def invalid_json(cls, detail: str) -> Self:
        return cls.invalid(f"The body is not valid JSON: {detail}", code="invalid_json")

    @classmethod
    def missing(cls, param: str) -> Self:
        return cls.invalid(f"Missing required field: '{param}'.", param=param, code="missing_required_parameter")

    @classmethod
    def wrong_type(cls, param: str, expected: str, value: Any) -> Self:
        message = f"Invalid type for '{param}': expected {expected}, but got {kind_of(value)}."
        return cls.invalid(message, param=param, code="invalid_type")

    @classmethod
    def unknown_value(cls, param: str, value: Any, known: Sequence[str]) -> Self:
        message = f"Invalid value for '{param}': {shown(value)}. Known values: {', '.join(known)}."
        return cls.invalid(message, param=param, code="invalid_value")

    @classmethod
    def unknown_field(cls, param: str) -> Self:
        """400: a field in no table of its engine; its name is shortened, because the client chose it."""
        name = param if len(param) <= SHOWN_CHARACTERS else param[:SHOWN_CHARACTERS] + "..."
        return cls.invalid(f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")

    @classmethod
    def unknown_part(cls, param: str, value: Any, known: Sequence[str]) -> Self:
        """400: a content part of a type that is not served; ``param`` is the part's ``type`` field."""
        message = f"Content parts of type {shown(value)} are not supported. Supported: {', '.join(known)}."
        return cls.invalid(message, param=param, code="unsupported_content_part")

    @classmethod
    def unknown_model(cls, model: str, served: Sequence[str] = ()) -> Self:
        """404; the message lists what is served, where that is given."""
        message = f"The model {shown(model)} does not exist or is not served here."
        if served:
            more = f" and {len(served) - SHOWN_NAMES} more" if len(served) > SHOWN_NAMES else ""
            message += f" Served: {', '.join(served[:SHOWN_NAMES])}{more}."
        return cls(404, message, param="model", code="model_not_found")

    @classmethod
    def too_large(cls, limit: int) -> Self:
        return cls(413, f"The request body is larger than the limit of {limit} bytes.", code="request_too_large")

    @classmethod
    def head_too_large(cls, limit: int) -> Self:
        message = f"The request's head is larger than the limit of {limit} bytes."
        return cls(431, message, code="head_too_large")

    @classmethod
    def too_slow(cls) -> Self:
        return cls(408, "The request body came too slowly.", code="request_timeout")

    @classmethod
    def unauthorized(cls, message: str = "Incorrect API key provided.") -> Self:
        return cls(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    @classmethod
    def keys_unreadable(cls) -> Self:
        message = "The router cannot read its API keys. Try again."
        return cls(503, message, type="server_error", code="keys_unreadable", headers={"Retry-After": "1"})

    @classmethod
    def exhausted(cls, param: str | None = None) -> Self:
        """503: this process has no free memory or file descriptors, which is neither the client's nor an engine's."""
        message = "The router has no free memory or file descriptors. Try again."
        return cls(503, message, type="server_error", param=param, code="router_exhausted", headers=RETRY)

    @classmethod
    def not_found(cls, method: str, path: str, meant: str = "") -> Self:
        """404: no such path. ``meant``: the path that the client probably meant."""
        hint = f" Did you mean {meant}?" if meant else ""
        return cls(404, f"Unknown request URL: {method} {path[:SHOWN_CHARACTERS]}.{hint}", code="unknown_url")

    @classmethod
    def not_served(cls, path: str) -> Self:
        message = f"The engines of this deployment do not serve {path}."
        return cls(404, message, code="route_not_served")

    @classmethod
    def unknown_response(cls, response_id: str, param: str) -> Self:
        return cls(404, f"There is no response {shown(response_id)}.", param=param, code="response_not_found")

    @classmethod
    def lost_response(cls, response_id: str, param: str, why: str) -> Self:
        """404: the response was stored in the memory of an engine that does not have it any more."""
        return cls(404, f"The response '{response_id}' is lost: {why}.", param=param, code="response_lost")

    @classmethod
    def method_not_allowed(cls, method: str, path: str, allowed: Sequence[str] = ("POST",)) -> Self:
        message = f"{method} is not allowed for {path[:SHOWN_CHARACTERS]}; use {' or '.join(allowed)}."
        return cls(405, message, code="method_not_allowed", headers={"Allow": ", ".join(allowed)})

    @classmethod
    def no_worker(cls, reason: str) -> Self:
        message = f"No engine can take the request now: {reason}. Try again."
        return cls(503, message, type="server_error", code="no_worker", headers=RETRY)

    @classmethod
    def no_frontend(cls) -> Self:
        message = "No router that the gateway allows can take the request now. Try again."
        return cls(503, message, type="server_error", code="no_frontend", headers=RETRY)

    @classmethod
    def busy(cls, message: str, *, param: str | None, code: str) -> Self:
        """429: a limit on work in progress is reached; the same request may succeed later."""
        return cls(429, message, type="rate_limit_error", param=param, code=code, headers=RETRY)

    @classmethod
    def queue_full(cls, reason: str) -> Self:
        return cls.busy(f"All queues are full: {reason}. Try again.", param=None, code="queue_full")

    @classmethod
    def router_full(cls, limit: int) -> Self:
        message = f"The requests under way hold the {limit} bytes that this router may hold. Try again."
        return cls.busy(message, param=None, code="router_full")

    @classmethod
    def rate_limited(cls, seconds: int, headers: Mapping[str, str]) -> Self:
        """429: the tenant's rate limit is reached; a request after ``seconds`` is admitted if it is the only one."""
        error = cls.busy(f"Too many requests: try again in {seconds} s.", param=None, code="rate_limited")
        error.headers |= {**headers, "Retry-After": str(seconds)}
        return error

    @classmethod
    def concurrency_limited(cls, limit: int, seconds: int) -> Self:
        message = f"Too many requests at the same time: {limit} are under way. Try again when one has ended."
        error = cls.busy(message, param=None, code="concurrency_limited")
        error.headers["Retry-After"] = str(seconds)
        return error

    @classmethod
    def internal(cls) -> Self:
        return cls(500, "The router failed. Its log has the request's id.", type="server_error", code="internal_error")

    @classmethod
    def broken_off(cls) -> Self:
        return cls(502, "The engine broke off its answer. Try again.", type="server_error", code="engine_lost")

    @classmethod
    def quarantined(cls) -> Self:
        message = "Engine processes ended under this request, so it is not sent to another one. Change the request."
        return cls.invalid(message, code="request_quarantined")

    @classmethod
    def from_engine(cls, status: int, body: bytes, field_of: FieldOf | None = None, hidden: Iterable[str] = ()) -> Self:
        """Convert an engine's error (OpenAI's shape, its older flat form, FastAPI's ``detail``, text) to OpenAI's.

        ``field_of`` names the field where the engine does not. ``hidden``: names that the client does not get, beside
        addresses. Raises ``ValueError`` for a status below 400.
        """
        if status < 400:
            raise ValueError(f"status {status} is no error")
        if status in (401, 403):
            message = "The engine refused the router's credentials."
            return cls(502, message, type="server_error", code="engine_error")
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = body[:2000].decode("utf-8", "replace").strip()
        message, param, code = _engine_words(answer)
        if field_of is not None and isinstance(answer, dict):
            param = field_of(status, answer) or param
        kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
        if not code:
            code = CONTEXT_LENGTH if status < 500 and _ABOUT_CONTEXT.search(message) else "engine_error"
        message = _without_places(message, hidden)
        message = message or f"The engine answered with status {status} and no readable error."
        return cls(status, message, type=kind, param=param, code=code)


def shown(value: Any) -> str:
    """Return a client's value for a message: scalars shortened, containers by their type only."""
    if isinstance(value, dict | list):
        return kind_of(value)
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    short = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
    return f"'{short}'" if isinstance(value, str) else short


def kind_of(value: Any) -> str:
    kinds = ((bool, "a boolean"), (str, "a string"), (int | float, "a number"), (list, "an array"), (dict, "an object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def field_path(place: Sequence[str | int]) -> str | None:
    """Return a validation error's location (``["body", "messages", 0, "role"]``) as clients write it."""
    path = ""
    for step in place[1:] if place and place[0] == "body" else place:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path or None


def _engine_words(answer: Any) -> tuple[str, str | None, str | None]:
    """Return (message, param, code) of an engine's decoded error body; the message is empty where there is none.

    A numeric code repeats the status, so it is left out: OpenAI's codes are words.
    """
    if isinstance(answer, str):
        return answer, None, None
    if not isinstance(answer, dict):
        return "", None, None
    error = answer.get("error", answer)
    if not isinstance(error, dict):
        return error if isinstance(error, str) else "", None, None
    message, param, code, detail = (error.get(name) for name in ("message", "param", "code", "detail"))
    if isinstance(message, str):
        return message, _word(param), _word(code)
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        place = detail[0].get("loc")
        return str(detail[0].get("msg") or ""), field_path(place) if isinstance(place, list) else None, None
    return detail if isinstance(detail, str) else "", None, None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _without_places(message: str, hidden: Iterable[str]) -> str:
    """Return a message without network addresses and the ``hidden`` names, which are the cluster's own business."""
    for name in hidden:
        message = message.replace(name, "the engine") if name else message
    return _ADDRESS.sub("(address)", message)


def _unicode(value: str) -> str:
    return value.encode("utf-8", "replace").decode()
