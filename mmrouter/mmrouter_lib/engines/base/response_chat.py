"""The chat whose prompt an engine makes of a request to ``/v1/responses`` that it gets as it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


class UnmodelledFieldError(Exception):
    """The engine renders a field of the request in a way that is not modelled, or refuses it."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


@dataclass(frozen=True, slots=True)
class ResponseChat:
    """A chat, as a prompter takes it, and its images: indices of message and part, and the part of the input."""

    body: Object
    images: list[tuple[int, int, Object]] = field(default_factory=list)


ChatOf = Callable[[Object], ResponseChat]
"""Returns the chat of a request's body. Raises :class:`UnmodelledFieldError`."""


def as_object(value: Any, path: str) -> Object:
    if not isinstance(value, dict):
        raise UnmodelledFieldError(path)
    return value


def as_list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise UnmodelledFieldError(path)
    return value


def as_text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise UnmodelledFieldError(path)
    return value
