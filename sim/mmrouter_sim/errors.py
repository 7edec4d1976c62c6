"""Errors in vLLM's shape: ``{"error": {"message", "type", "param", "code"}}`` (captures,
docs/engine-facts/vllm.md#image-uuid)."""

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


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
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_response(error: RequestError) -> Response:
    return json_response(error.body(), error.status)
