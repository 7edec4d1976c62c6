"""A streamed answer as texts per choice, independent of its chunks, and the rest of a repeated answer.

Two engines split the same answer into different chunks: a chunk holds the tokens of one step, or of several where the
engine's web server lags. So an answer is compared as text per field, log probabilities as counts of tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
END = b"\n\n"  # of an event; engines write no other line end, and none occurs within JSON
_DATA = b"data:"

Chunk = dict[str, Any]
_LISTS = ("content", "refusal", "tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Lists of ``logprobs`` with one entry per token: a chat's, then a completion's."""


class DivergedError(Exception):
    """The other engine's answer differs from what the client has."""


class UnreadableError(Exception):
    """An event is not a chunk of a known form."""


class EngineFaultError(Exception):
    """The stream itself reports that its engine failed or aborted the request."""


@dataclass(slots=True)
class _Text:
    name: str  # of the field: content, reasoning, tool_calls.0.arguments
    text: str


@dataclass(slots=True)
class _Choice:
    """What the client has of one choice, and how far a repetition has reproduced it. ``head``: the fields that all its
    chunks have, which hold an id of the choice on SGLang.
    """

    head: Chunk
    texts: list[_Text] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)  # list with an entry per token -> entries
    ids: list[int] = field(default_factory=list)
    role: bool = False
    finish: str | None = None
    at: int = 0  # reproduced: texts before this one
    offset: int = 0  # and characters of this text
    seen: dict[str, int] = field(default_factory=dict)

    @property
    def reproduced(self) -> bool:
        return not self.texts or (self.at == len(self.texts) - 1 and self.offset == len(self.texts[-1].text))

    def restart(self) -> None:
        self.at = self.offset = 0
        self.seen = {}

    def add(self, name: str, text: str) -> str:
        """Return the part of ``text`` that the client does not have. Raises :class:`DivergedError`."""
        while text and not self.reproduced:
            mine = self.texts[self.at]
            size = min(len(mine.text) - self.offset, len(text))
            if not size:
                self.at, self.offset = self.at + 1, 0
                continue
            if mine.name != name or not mine.text.startswith(text[:size], self.offset):
                raise DivergedError
            self.offset += size
            text = text[size:]
        if text:
            if self.finish is not None:
                raise DivergedError
            if not self.texts or self.texts[-1].name != name:
                self.texts.append(_Text(name, ""))
            last = self.texts[-1]
            last.text += text
            self.at, self.offset = len(self.texts) - 1, len(last.text)
        return text

    def count(self, name: str, entries: list[Any]) -> list[Any]:
        """Return the entries that the client does not have."""
        seen, sent = self.seen.get(name, 0), self.tokens.get(name, 0)
        self.seen[name] = seen + len(entries)
        self.tokens[name] = max(sent, self.seen[name])
        return entries[max(0, sent - seen) :]


class StreamedAnswer:
    """What a client has of a streamed answer. :meth:`merge` adds an event and returns what is new in it."""

    def __init__(self) -> None:
        self.done = False  # the last event has been sent
        self._choices: dict[int, _Choice] = {}
        self._head: Chunk = {}  # that of the first chunk, for choices of a repetition and chunks without any
        self._repeated = False
        self._prompt_tokens = 0  # their number, if the engine reports their ids
        self._others = self._others_seen = 0  # chunks without choices: usage, an engine's extensions

    @classmethod
    def read(cls, events: bytes) -> "StreamedAnswer":
        """Return the answer after these whole events. Raises what :meth:`merge` raises."""
        answer = cls()
        for event in split(events):
            answer.merge(event)
        return answer

    @property
    def reproduced(self) -> bool:
        """Whether a repetition has reached the end of what the client has."""
        return self._others_seen >= self._others and all(choice.reproduced for choice in self._choices.values())

    @property
    def begun(self) -> bool:
        """Whether there was a chunk."""
        return bool(self._head)

    @property
    def finished(self) -> bool:
        """Whether a choice has its finish reason."""
        return any(choice.finish is not None for choice in self._choices.values())

    @property
    def ids(self) -> list[int]:
        """The token ids of the only choice, as far as the engine reports them."""
        return self._choices[0].ids if self._choices else []

    def ending(self, *, with_usage: bool) -> bytes:
        """Return the events behind the finish reason of a stream that reports its token ids."""
        prompt, answer = self._prompt_tokens, len(self.ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        chunk = self._head | {"choices": [], "usage": usage}
        return (b"data: " + orjson.dumps(chunk) + END if with_usage and not self._others else b"") + DONE

    def drop_last_id(self) -> None:
        """Remove the last token, whose incomplete character has no text yet. Raises ``ValueError`` where the client has
        its log probability.
        """
        only = self._choices[0]
        if only.tokens.keys() - {"token_ids"}:
            raise ValueError("the client has the log probability of a token without text")
        only.ids.pop()
        only.tokens["token_ids"] = only.seen["token_ids"] = len(only.ids)

    def restart(self) -> None:
        """Expect a repetition of the answer from its beginning."""
        self._others_seen, self._repeated = 0, True
        for choice in self._choices.values():
            choice.restart()

    def merge(self, event: bytes, convert: Callable[[Chunk], Chunk] | None = None) -> bytes:
        """Return the event without the part that the client has; empty if nothing is left.

        ``convert``: from the engine's chunk to the client's. Raises :class:`DivergedError`, :class:`UnreadableError`
        and :class:`EngineFaultError`.
        """
        data = data_of(event)
        if data is None:
            return b""  # a comment
        if data == b"[DONE]":
            if not self.reproduced:
                raise DivergedError
            self.done = True
            return DONE
        try:
            chunk = orjson.loads(data)
            if chunk.get("error") is not None:
                raise EngineFaultError
            rest = self._rest(chunk if convert is None else convert(chunk))
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise UnreadableError from error
        if rest is None:
            return b""
        choices = rest["choices"]
        head = self._choices[choices[0]["index"]].head if choices else self._head
        return b"data: " + orjson.dumps(rest | head) + END

    def _rest(self, chunk: Chunk) -> Chunk | None:
        head = {name: chunk[name] for name in ("id", "object", "created", "model")}
        self._head = self._head or head
        if self._repeated:
            head = self._head
        for part in (chunk, *chunk["choices"]):  # a chat's prompt ids are in the chunk, a completion's in a choice
            self._prompt_tokens = len(part.get("prompt_token_ids") or ()) or self._prompt_tokens
        if not chunk["choices"]:
            self._others_seen += 1
            if self._others_seen <= self._others:
                return None
            self._others = self._others_seen
            return chunk
        choices = [rest for choice in chunk["choices"] if (rest := self._rest_of_choice(choice, head)) is not None]
        return {**chunk, "choices": choices} if choices else None

    def _rest_of_choice(self, choice: Chunk, head: Chunk) -> Chunk | None:
        mine = self._choices.setdefault(choice["index"], _Choice(head))
        whole = mine.reproduced
        rest = dict(choice)
        new = False
        if "delta" in choice:
            rest["delta"], new = _rest_of_delta(mine, choice["delta"])
        else:
            rest["text"] = mine.add("text", choice["text"])
            new = bool(rest["text"])
        if choice.get("token_ids"):
            rest["token_ids"] = mine.count("token_ids", choice["token_ids"])
            mine.ids += rest["token_ids"]
            new |= bool(rest["token_ids"])
        if logprobs := choice.get("logprobs"):
            rest["logprobs"] = dict(logprobs)
            for name in _LISTS:
                if logprobs.get(name):
                    rest["logprobs"][name] = mine.count(name, logprobs[name])
                    new |= bool(rest["logprobs"][name])
        finish = choice.get("finish_reason")
        if finish == "abort":
            raise EngineFaultError
        if finish is not None:
            if not mine.reproduced or mine.finish not in (None, finish):
                raise DivergedError
            new |= mine.finish is None
            mine.finish = finish
        # A chunk without text is a step whose tokens complete no character. It is new only after the repeated part.
        return rest if new or (whole and mine.finish is None and not _is_start(choice)) else None


def _rest_of_delta(mine: _Choice, delta: Chunk) -> tuple[Chunk, bool]:
    """Return a chat's delta without the part that the client has, and whether anything is left."""
    rest, new = dict(delta), False
    for name, value in delta.items():
        if name == "role":
            if value is not None:
                new |= not mine.role
                mine.role = True
        elif name == "tool_calls" and value:
            rest[name] = [call for call in (_rest_of_call(mine, call) for call in value) if call is not None]
            new |= bool(rest[name])
            if not rest[name]:
                del rest[name]
        elif isinstance(value, str):
            rest[name] = mine.add(name, value)
            new |= bool(rest[name])
        elif value:
            raise UnreadableError
    return rest, new


def _rest_of_call(mine: _Choice, call: Chunk) -> Chunk | None:
    """Return a part of a tool call without the part that the client has. A call keeps the first engine's random id."""
    function, number = call.get("function") or {}, call["index"]
    rest = dict(function)
    if name := function.get("name"):
        rest["name"] = mine.add(f"tool_calls.{number}.name", name)
        if not rest["name"]:
            del rest["name"]
    arguments = function.get("arguments")
    if arguments is not None:
        rest["arguments"] = mine.add(f"tool_calls.{number}.arguments", arguments)
    if rest.get("name"):
        return {**call, "function": rest}
    return {"index": number, "function": rest} if rest.get("arguments") else None


def _is_start(choice: Chunk) -> bool:
    return (choice.get("delta") or {}).get("role") is not None


def split(events: bytes) -> Iterator[bytes]:
    """Yield whole events, without the empty line between them."""
    return (event for event in events.split(END) if event)


def data_of(event: bytes) -> bytes | None:
    """Return the data of an event, ``None`` for one without."""
    lines = event.split(b"\n")
    data = [line.removeprefix(_DATA).strip() for line in lines if line.startswith(_DATA)]
    return b"\n".join(data) if data else None
