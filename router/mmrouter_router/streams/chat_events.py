"""The events of a chat's stream, and the base of the converters that turn them into another API's events. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import orjson

from mmrouter_router.core.errors import RequestError
from mmrouter_router.streams.answer import data_of, split

Object = dict[str, Any]


class ChatEventConverter(ABC):
    """Converts the events of a chat's stream, as far as its first choice. A subclass forms the events of its API."""

    def __init__(self) -> None:
        self._begun = False
        self._finish: str | None = None
        self._usage: Object | None = None
        self._over = False

    def feed(self, events: bytes) -> bytes:
        """Return the converted events for whole events of a chat."""
        return b"".join(made for event in split(events) for made in self._event(event))

    def _event(self, event: bytes) -> Iterator[bytes]:
        data = data_of(event)
        if self._over or not data:
            return
        if data == b"[DONE]":
            self._over = True
            yield from self._end()
            return
        chunk = orjson.loads(data)
        if chunk.get("error") is not None:
            self._over = True
            yield self._failure(RequestError.from_engine(500, data))
            return
        if not self._begun:
            self._begun = True
            yield from self._begin(chunk)
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices", ())[:1]:
            self._finish = choice.get("finish_reason") or self._finish
            yield from self._choice(choice, choice.get("delta") or {})

    @abstractmethod
    def _begin(self, chunk: Object) -> Iterator[bytes]:
        """Yield the first events; ``chunk`` is the chat's first chunk, and has its id and model."""

    @abstractmethod
    def _choice(self, choice: Object, delta: Object) -> Iterator[bytes]:
        """Yield the events for a chunk's choice."""

    @abstractmethod
    def _end(self) -> Iterator[bytes]:
        """Yield the events of the end of a whole answer."""

    @abstractmethod
    def _failure(self, error: RequestError) -> bytes:
        """Return the event that ends an answer that failed."""


def reasoning_of(message: Object) -> str:
    """Return the reasoning in a chat's message or delta, in either engine's field."""
    return message.get("reasoning") or message.get("reasoning_content") or ""
