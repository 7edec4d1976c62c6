"""Streams that are read in threads while a fault hits their engine, and the answers of an undisturbed engine."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import httpx
from local.rig import Deployment
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

SECONDS = 240.0  # bounds a wait
IMAGES = [data_uri(picture(f"stream {n}", 112, 112)) for n in range(4)]
GREEDY: Mapping[str, float] = {"temperature": 0}
BEST_ONLY: Mapping[str, float] = {"temperature": 1, "min_p": 1}
"""Sampled for the router, but only the most probable token can be drawn."""
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


class Received(NamedTuple):
    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    listed: list[tuple[str, int]]
    """Tokens with log probabilities, and the number of others beside each."""


def _listed(choice: Mapping[str, Any]) -> list[tuple[str, int]]:
    found = (choice.get("logprobs") or {}).get("content") or ()
    return [(entry["token"], len(entry["top_logprobs"])) for entry in found]


def whole_answer(url: str, request: dict[str, Any], path: str = CHAT) -> Received:
    """Return an answer that is not streamed."""
    answer = httpx.post(url + path, json=request, timeout=SECONDS).raise_for_status().json()
    choice, usage = answer["choices"][0], answer["usage"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return Received(text, choice["finish_reason"], *counts, _listed(choice))


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
        return bool(self.error) or self.end != "data: [DONE]" or "error" in self.chunks[-1]

    @property
    def received(self) -> Received:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
        (finish,) = (choice["finish_reason"] for choice in choices if choice["finish_reason"])
        (usage,) = (chunk["usage"] for chunk in self.chunks if chunk.get("usage"))
        listed = [entry for choice in choices for entry in _listed(choice)]
        return Received(text, finish, usage["prompt_tokens"], usage["completion_tokens"], listed)


@dataclass
class Streams:
    """The streams of one deployment, and the answers that they should give.

    ``sampling``: fields under which an answer can be compared with another one.
    """

    deployment: Deployment
    count: int
    tokens: int
    sampling: Mapping[str, float] = field(default_factory=lambda: GREEDY)
    path: str = CHAT

    def __post_init__(self) -> None:
        with ThreadPoolExecutor(16) as pool:
            ask = partial(whole_answer, self.deployment.url, path=self.path)
            self.answers = list(pool.map(ask, self.requests))

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [body(number, self.tokens, self.path, **self.sampling) for number in range(self.count)]

    def assert_outlive(self, strike: Callable[[str], None]) -> None:
        """Begin all streams, strike the engine with most of them, and compare each stream with its answer."""
        deployment = self.deployment
        before = deployment.metric(BREAKS)
        streams = [Stream(deployment.url, request, self.path) for request in self.requests]
        with _read(streams):
            wait_for(lambda: all(len(stream.chunks) > 3 for stream in streams), SECONDS, "every stream has begun")
            strike(self.busiest())
        errors = [stream.error or stream.chunks[-1]["error"] for stream in streams if stream.broken]
        assert not errors, errors
        different = [
            (got, wanted)
            for got, wanted in zip((s.received for s in streams), self.answers, strict=True)
            if got != wanted
        ]
        assert not different, different
        heads = [{(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream.chunks} for stream in streams]
        assert {len(each) for each in heads} == {1}
        assert deployment.metric(BREAKS) > before
        assert deployment.metric(BREAKS, outcome="continued") == deployment.metric(BREAKS)

    def busiest(self) -> str:
        """Return the name of the worker with most requests in flight."""
        load: dict[str, int] = {}
        for number in range(len(self.deployment.controls)):
            for worker in self.deployment.state(number)["workers"]:
                load[worker["name"]] = load.get(worker["name"], 0) + worker["in_flight"]
        return max(load, key=lambda name: load[name])


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
