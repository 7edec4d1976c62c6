"""Errors in vLLM's shape: ``{"error": {"message", "type", "param", "code"}}`` (captures,
docs/engine-facts/vllm.md#image-uuid)."""

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


log = logging.getLogger("mmrouter_sim.access")


class RequestError(Exception):
    """A request that is answered with an error. ``param`` names the field at fault where the engine names it."""

    def __init__(self, message: str, *, status: int = 400, kind: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or _TYPES[status]
        self.param = param

    def body(self) -> dict[str, Any]:
        message = str(self)
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.status}}


def parameter_error(message: str, param: str, value: object = None) -> RequestError:
    """Return the error for one parameter; the engine repeats its name, and its value if there is one, at the end."""
    shown = "" if value is None else f", value={value}"
    return RequestError(f"{message} (parameter={param}{shown})", param=param)


def validation_error(message: str) -> RequestError:
    """Return the error for a body that is not of the request's form."""
    return RequestError(message, kind=HTTPStatus.BAD_REQUEST.phrase)


def json_response(value: object, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_response(error: RequestError) -> Response:
    """Return the answer for an error."""
    return json_response(error.body(), error.status)


def note_refusal(scope: Scope) -> None:
    """Write the line that the engine's server writes of a request without its key; other requests have none here.

    It is the only trace that vLLM keeps: its own count of requests is taken behind the check of the key.
    """
    host, port = scope.get("client") or ("", 0)
    log.info('%s:%d - "%s %s HTTP/1.1" 401 Unauthorized', host, port, scope["method"], scope["path"])
