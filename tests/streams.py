"""Streams that are read in threads while a fault hits their engine, and the answers of an undisturbed engine."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import httpx
from local.rig import Deployment
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

SECONDS = 240.0  # bounds a wait
IMAGES = [data_uri(picture(f"stream {n}", 112, 112)) for n in range(4)]
GREEDY: Mapping[str, float] = {"temperature": 0}
BEST_ONLY: Mapping[str, float] = {"temperature": 1, "min_p": 1}
"""Sampled for the router, but only the most probable token can be drawn."""
SEEDED: Mapping[str, float] = {"temperature": 1, "seed": 7}
TOOL = {
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {"terms": {"type": "array", "items": {"type": "string"}, "minItems": 200}},
        "required": ["terms"],
    },
}
TOOLS: Mapping[str, Any] = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
"""Every answer is one tool call, which ends at ``max_tokens``."""
CHOICES: Mapping[str, Any] = {"n": 2}
WHOLE_ANSWER: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "stop": {"stop": ["a text that does not occur"]},
    "grammar": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "numbers",
                "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 200},
            },
        }
    },
    "tools": TOOLS,
    "choices": CHOICES,
    "bad_words": {"bad_words": ["harbour", "light"]},
}
"""Fields of chats whose effect depends on the whole answer, not only on the tokens that are still to come."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BREAKS = "mmrouter_stream_breaks_total"


def body(number: int, tokens: int, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    """Return a request; every second chat has an image."""
    text = f"Story {number} of the sea, told at length. " * 3
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if number % 2:
        parts.append({"type": "image_url", "image_url": {"url": IMAGES[number % 4]}})
    prompt = {"messages": [{"role": "user", "content": parts}]} if path == CHAT else {"prompt": text}
    return {"model": "demo", **prompt, "max_tokens": tokens, "ignore_eos": True, **GREEDY, **fields}


@dataclass
class Choice:
    """What one choice says. ``calls``: names and arguments of tools. ``listed``: tokens with log probabilities, and the
    number of others beside each.
    """

    text: str = ""
    calls: str = ""
    finish: list[str] = field(default_factory=list)
    listed: list[tuple[str, int]] = field(default_factory=list)

    def add(self, part: Mapping[str, Any]) -> None:
        """Add a choice of a chunk or of a whole answer."""
        message = part.get("delta") or part.get("message") or part
        self.text += message.get("text") or message.get("content") or ""
        for call in message.get("tool_calls") or ():
            self.calls += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        self.finish += [part["finish_reason"]] if part["finish_reason"] else []
        logprobs = part.get("logprobs") or {}
        self.listed += [(entry["token"], len(entry["top_logprobs"])) for entry in logprobs.get("content") or ()]
        tokens = logprobs.get("tokens") or ()
        self.listed += [
            (token, len(top)) for token, top in zip(tokens, logprobs.get("top_logprobs") or (), strict=True)
        ]


class Received(NamedTuple):
    choices: dict[int, Choice]
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, parts: Iterable[Mapping[str, Any]], usage: Mapping[str, int]) -> Self:
        choices: dict[int, Choice] = {}
        for part in parts:
            choices.setdefault(part["index"], Choice()).add(part)
        return cls(choices, usage["prompt_tokens"], usage["completion_tokens"])


def whole_answer(url: str, request: dict[str, Any], path: str = CHAT) -> Received:
    """Return an answer that is not streamed."""
    answer = httpx.post(url + path, json=request, timeout=SECONDS).raise_for_status().json()
    return Received.of(answer["choices"], answer["usage"])


def undisturbed(url: str, request: dict[str, Any], path: str = CHAT) -> Received:
    """Return an answer that is streamed by one engine."""
    stream = Stream(url, request, path)
    stream.read()
    assert not stream.broken, stream.error or stream.chunks[-1:]
    return stream.received


@dataclass
class Stream:
    """One stream, read in a thread of its own."""

    url: str
    request: dict[str, Any]
    path: str = CHAT
    chunks: list[dict[str, Any]] = field(default_factory=list)
    end: str = ""
    error: str = ""

    def read(self) -> None:
        request = {**self.request, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with httpx.stream("POST", self.url + self.path, json=request, timeout=SECONDS) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.chunks.append(json.loads(line[6:]))
                    elif line:
                        self.end = line
        except httpx.HTTPError as error:
            self.error = repr(error)

    @property
    def broken(self) -> bool:
        return bool(self.error) or self.end != "data: [DONE]" or not self.chunks or "error" in self.chunks[-1]

    @property
    def heads(self) -> list[set[tuple[str, int, str]]]:
        """Ids, times and models of each choice's chunks. SGLang's choices have an id of their own, but the chunks with
        their finish reasons all have that of one choice.
        """
        found: dict[int, set[tuple[str, int, str]]] = {}
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                if choice["finish_reason"] and self.request.get("n", 1) > 1:
                    continue
                found.setdefault(choice["index"], set()).add((chunk["id"], chunk["created"], chunk["model"]))
        return list(found.values())

    @property
    def received(self) -> Received:
        (usage,) = (chunk["usage"] for chunk in self.chunks if chunk.get("usage"))
        return Received.of((choice for chunk in self.chunks for choice in chunk["choices"]), usage)


@dataclass
class Streams:
    """The streams of one deployment, and the answers that they should give.

    ``fields``: of the requests, under which an answer can be compared with another one.
    """

    deployment: Deployment
    count: int
    tokens: int
    fields: Mapping[str, Any] = field(default_factory=lambda: GREEDY)
    path: str = CHAT

    def __post_init__(self) -> None:
        with ThreadPoolExecutor(16) as pool:
            ask = partial(undisturbed, self.deployment.url, path=self.path)
            self.answers = list(pool.map(ask, self.requests))

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [body(number, self.tokens, self.path, **self.fields) for number in range(self.count)]

    def assert_outlive(self, strike: Callable[[str], object]) -> None:
        """Begin all streams, strike the engine with most of them, and compare each stream with its answer. ``strike``
        returns ``False`` where it came too late and did nothing: then all of them begin again.
        """
        deployment = self.deployment
        before = deployment.metric(BREAKS)
        busiest = ""
        while not busiest:  # on a slow machine, the first streams may end before the last ones begin
            streams = [Stream(deployment.url, request, self.path) for request in self.requests]
            with _read(streams):
                wait_for(lambda s=streams: all(len(one.chunks) > 3 for one in s), SECONDS, "every stream has begun")
                if (busiest := self.busiest()) and strike(busiest) is False:
                    busiest = ""
        errors = [stream.error or stream.chunks[-1:] for stream in streams if stream.broken]
        assert not errors, errors
        different = [
            (got, wanted)
            for got, wanted in zip((s.received for s in streams), self.answers, strict=True)
            if got != wanted
        ]
        assert not different, different
        assert {len(heads) for stream in streams for heads in stream.heads} == {1}
        assert deployment.metric(BREAKS) > before
        assert deployment.metric(BREAKS, outcome="continued") == deployment.metric(BREAKS)

    def busiest(self) -> str:
        """Return the name of the worker with most requests in flight, empty where there is none."""
        load = self.load()
        return max(load, key=lambda name: load[name]) if any(load.values()) else ""

    def load(self) -> Counter[str]:
        """Return the requests in flight of each worker, by its name."""
        load = Counter[str]()
        for number in range(len(self.deployment.controls)):
            for worker in self.deployment.state(number)["workers"]:
                load[worker["name"]] += worker["in_flight"]
        return load


@contextmanager
def _read(streams: Sequence[Stream]):
    threads = [threading.Thread(target=stream.read) for stream in streams]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(SECONDS)
