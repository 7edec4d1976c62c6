"""The whole routing cost of one request: body in, an engine's body out; in this process, without sockets.

A conversation of 8k tokens and an image of 1 MB, with a new turn in every request, through the router's own objects as
the process wires them: parse, base64, identity, size, template, tokens, keys, decision among 64 workers, rewrite.
*Warm*: conversation and image were there before. *Cold*: nobody has seen the image.

The naive way does the same with what is at hand: json, base64 and hashlib of the standard library, an image that is
decoded to be hashed, the whole text tokenized, a chain of SHA-256, a full scan. Both must choose the same overlap.
"""

import asyncio
import base64
import gc
import hashlib
import io
import json
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import zmq
from PIL import Image

from bench.placing import router_objects as bench_fleet
from bench.placing.block_workload import BLOCK_SIZE
from bench.placing.tokenization import REAL, TINY, WORDS
from bench.rows import Row, not_run, percentile, row
from mmrouter_lib.block_keys import pack_keys
from mmrouter_router.app import Router
from mmrouter_router.core.settings import CurveKeys, Settings
from mmrouter_router.intake.tenants import DEFAULT
from mmrouter_router.request.engine_request import CHAT

WORKERS = 64
PROMPT_TOKENS = 8192
ROUNDS, NAIVE_EVERY = 120, 8
IMAGE_BYTES = 1_000_000
SIDES = (1120, 896)
PAD = "<|image_pad|>"
WARM, COLD, NAIVE = "warm", "cold image", "naive"
GOALS = {WARM: "<= 3", COLD: "<= 8"}


class AnswersDifferError(Exception):
    """The two ways have other tokens or choose another overlap: their times mean nothing."""


@dataclass
class Timed:
    """CPU milliseconds of each request, by way: all of it is in one thread, and other load disturbs times more."""

    ms: dict[str, list[float]] = field(default_factory=lambda: {WARM: [], COLD: [], NAIVE: []})

    def take(self, way: str, began: int) -> None:
        """Note one that began at a time of ``thread_time_ns``."""
        self.ms[way].append((time.thread_time_ns() - began) / 1e6)


def run() -> list[Row]:
    """Measure the tiny model of the examples and, where its folder is there, a real one's tokenizer and template."""
    rows = asyncio.run(measure("tiny tokenizer", TINY))
    if (REAL / "tokenizer.json").is_file():
        return rows + asyncio.run(measure("Qwen2.5-VL", REAL))
    missing = f"no folder {REAL.name}"
    return rows + [not_run(name("Qwen2.5-VL", f"{way}, p50"), "ms", missing, goal=goal) for way, goal in GOALS.items()]


async def measure(label: str, folder: Path, rounds: int = ROUNDS) -> list[Row]:
    """Return the rows of one model. Raises :class:`AnswersDifferError`."""
    ours = Ours(folder)
    try:
        timed = await compare(ours, rounds)
    finally:
        await ours.close()
    return rows(label, timed)


async def compare(ours: "Ours", rounds: int) -> Timed:
    """Let the ways take turns; every request has a turn of its own."""
    talk, timed = Talk(ours), Timed()
    await ours.fill(talk.body(0))
    naive = Naive(ours, talk.body(0))
    # As the router does at its start: what lives for good is not looked at by collections.
    gc.collect()
    gc.freeze()
    try:
        await take_turns(ours, naive, talk, timed, rounds)
    finally:
        gc.unfreeze()
    return timed


async def take_turns(ours: "Ours", naive: "Naive", talk: "Talk", timed: Timed, rounds: int) -> None:
    """Measure; raises :class:`AnswersDifferError`."""
    for number in range(1, rounds + 1):
        warm, cold = talk.body(2 * number), talk.body(2 * number + 1, image=number)
        # Who comes first finds cold caches, so they take turns at it.
        for way, raw in sorted({WARM: warm, COLD: cold}.items(), reverse=number % 2 == 1):
            began = time.thread_time_ns()
            await ours.route(raw)
            timed.take(way, began)
        if number % NAIVE_EVERY == 0:
            began = time.thread_time_ns()
            ids, overlap = naive.route(warm)
            timed.take(NAIVE, began)
            if (ids, overlap) != await ours.answer(warm):
                raise AnswersDifferError(f"request {number}: the naive way has an overlap of {overlap} blocks")


def rows(label: str, timed: Timed) -> list[Row]:
    """Return the figures, and their ratio to the naive way."""
    slow = percentile(timed.ms[NAIVE], 0.5)
    found = []
    for way, goal in GOALS.items():
        fast = percentile(timed.ms[way], 0.5)
        words = f"naive: p50 {slow:.4g} ms, without the model's image processor"
        found += [
            row(name(label, f"{way}, p50"), fast, "ms", goal=goal),
            row(name(label, f"{way}, p99"), percentile(timed.ms[way], 0.99), "ms"),
            row(name(label, f"{way}, below the naive way"), slow / fast, "x", peer=words),
        ]
    return found


def name(label: str, what: str) -> str:
    """Return a row's name."""
    return f"routing, {PROMPT_TOKENS} tokens and an image of 1 MB, {label}: {what}"


class Ours:
    """A router as its process wires it, with workers that hold beginnings of one conversation; nothing is sent."""

    def __init__(self, folder: Path) -> None:
        public, secret = zmq.curve_keypair()
        deployment = bench_fleet.deployment(replicas=WORKERS)
        curve = CurveKeys(public, secret, public)
        self.router = Router(
            Settings(deployment, "bench", "127.0.0.1", folder / "nowhere", folder, bytes(32), "key", "token", curve)
        )
        _, self.workers = bench_fleet.synced(WORKERS, fleet=self.router.fleet)

    async def route(self, raw: bytes) -> tuple[bytes, "array[int]", int]:
        """Return the engine's body, the prompt's ids and the overlap of the worker that is chosen."""
        prepared = await self.router.chat.prepare(CHAT, raw, DEFAULT)
        outgoing = self.router.chat._outgoing(CHAT, prepared)
        decision = self.router.placer.place(prepared)
        return outgoing.plain, prepared.ids, decision.choice.winner.overlap

    async def answer(self, raw: bytes) -> tuple["array[int]", int]:
        """Return what another way must have found, too."""
        _, ids, overlap = await self.route(raw)
        return ids, overlap

    async def fill(self, raw: bytes) -> None:
        """Have each worker hold another part of a request's prompt."""
        prepared = await self.router.chat.prepare(CHAT, raw, DEFAULT)
        keys = prepared.keys(BLOCK_SIZE)
        for number, worker in enumerate(self.workers):
            packed = pack_keys(keys[: held(number, len(keys))])
            self.router.fleet.published(worker, bench_fleet.delta(1, packed))

    async def close(self) -> None:
        """Let go of what the router holds."""
        self.router.upstream.close()
        await self.router.media.close()
        self.router._context.destroy(linger=0)


class Naive:
    """The same request by the standard library, an image decoder and a tokenizer."""

    def __init__(self, ours: Ours, raw: bytes) -> None:
        prompter, family = ours.router.preparer.prompter, ours.router.preparer.family
        assert prompter is not None
        assert family is not None
        self._prompter, self._family = prompter, family
        keys = self._keys(*self._prompt(json.loads(raw)))
        self._held = [set(keys[: held(number, len(keys))]) for number in range(WORKERS)]

    def route(self, raw: bytes) -> tuple["array[int]", int]:
        """Return the prompt's ids and the overlap of the worker that is chosen."""
        body = json.loads(raw)
        ids, identity = self._prompt(body)
        keys = self._keys(ids, identity)
        best = 0
        for held_there in self._held:
            found = [key in held_there for key in keys]
            best = max(best, found.index(False) if False in found else len(keys))
        body["messages"][1]["content"][0]["uuid"] = identity.hex()
        json.dumps(body).encode()
        return ids, best

    def _prompt(self, body: dict[str, Any]) -> tuple["array[int]", bytes]:
        url = body["messages"][1]["content"][0]["image_url"]["url"]
        image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
        identity = hashlib.sha256(image.tobytes()).digest()
        text = self._prompter.render(body["messages"])
        text = text.replace(PAD, PAD * self._family.count(*image.size))
        ids = self._prompter.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return array("I", ids), identity

    @staticmethod
    def _keys(ids: "array[int]", identity: bytes) -> Sequence[bytes]:
        keys, parent = [], identity
        for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = hashlib.sha256(parent + ids[start : start + BLOCK_SIZE].tobytes()).digest()
            keys.append(parent)
        return keys


class Talk:
    """Bodies of requests: one conversation about one image, each with a turn of its own at its end."""

    def __init__(self, ours: Ours) -> None:
        assert ours.router.preparer.prompter is not None
        encode = ours.router.preparer.prompter.tokenizer.encode
        self._jpeg = picture(IMAGE_BYTES)
        self._turns: list[dict[str, Any]] = []
        tokens = 0
        while tokens < PROMPT_TOKENS:
            text = f"{len(self._turns)}. {WORDS * 2}"
            tokens += len(encode(text, add_special_tokens=False).ids)
            role = ("assistant", "user")[len(self._turns) % 2]
            self._turns.append({"role": role, "content": text})

    def body(self, turn: int, *, image: int = 0) -> bytes:
        """Return a request with a turn of this number; ``image``: another number is another image."""
        comment = image.to_bytes(8, "big")
        jpeg = self._jpeg[:2] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment + self._jpeg[2:]
        url = "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()
        asked = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f"What is it? {WORDS}"}]
        messages = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": asked},
            *self._turns,
            {"role": "user", "content": f"Turn {turn}: {WORDS}"},
        ]
        return orjson.dumps({"model": "bench", "messages": messages, "max_tokens": 16})


def held(worker: int, blocks: int) -> int:
    """Return how many leading blocks of a prompt a worker holds: none of them the whole."""
    return random.Random(worker).randrange(blocks * 9 // 10)


def picture(size: int) -> bytes:
    """Return a JPEG of at least ``size`` bytes with as many details as a photograph that large."""
    image = Image.merge("RGB", [Image.effect_noise(SIDES, sigma) for sigma in (40, 50, 60)])
    for quality in range(92, 100):
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        if file.tell() >= size:
            return file.getvalue()
    raise ValueError(f"no quality makes {size} bytes of {SIDES}")
