"""CPU time of the complete request path, from a client's body to an engine's, in process and without sockets, against a
naive way that must choose the same overlap (docs/performance.md, *routing*).
"""

import asyncio
import base64
import gc
import hashlib
import io
import json
import os
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
from tokenizers import Tokenizer

from bench.placing import workload
from bench.placing.workload import BLOCK_SIZE, PROMPT_TOKENS, detailed_jpeg
from bench.report import AnswersDifferError, Row, not_run, percentile, row
from mmrouter_lib.block_keys import pack_keys
from mmrouter_lib.prompt import Prompter
from mmrouter_router.app import Router
from mmrouter_router.core.settings import CurveKeys, Settings
from mmrouter_router.intake.api_key_auth import DEFAULT
from mmrouter_router.request.prepared import CHAT

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "models" / "tiny-qwen2-vl"
REAL = Path(os.environ.get("MMROUTER_MODELS") or ROOT.parent / "shared" / "models") / "Qwen--Qwen2.5-VL-7B-Instruct"
WORDS = (
    "The captain crossed the harbour, counted 49 lamps and wrote a letter home; no reader understood it. "
    "for i in range(0, len(ids), size):\n    yield ids[i : i + size]\n"
    'Größe, 你好,世界 and 3.14159: what the painter saw was "a bridge", or so she said. '
)
WORKERS = 64
ROUNDS, NAIVE_EVERY = 120, 8
IMAGE_BYTES = 1_000_000
PAD = "<|image_pad|>"
WARM, COLD, NAIVE = "warm", "cold image", "naive"
GOALS = {WARM: "<= 3", COLD: "<= 8"}


@dataclass
class Timed:
    """CPU milliseconds of each request by way; CPU of one thread, which other load disturbs less than elapsed time."""

    ms: dict[str, list[float]] = field(default_factory=lambda: {WARM: [], COLD: [], NAIVE: []})

    def add(self, way: str, began: int) -> None:
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
    """Measure all ways with interleaved requests, each with a new turn."""
    bodies, timed = RequestBodies(ours), Timed()
    await ours.fill(bodies.body(0))
    naive = Naive(ours, bodies.body(0))
    # As the router does at its start: keep long-lived objects out of collections.
    gc.collect()
    gc.freeze()
    try:
        for number in range(1, rounds + 1):
            warm, cold = bodies.body(2 * number), bodies.body(2 * number + 1, image=number)
            # The first one finds cold CPU caches, so they alternate.
            for way, raw in sorted({WARM: warm, COLD: cold}.items(), reverse=number % 2 == 1):
                began = time.thread_time_ns()
                await ours.route(raw)
                timed.add(way, began)
            if number % NAIVE_EVERY == 0:
                began = time.thread_time_ns()
                ids, overlap = naive.route(warm)
                timed.add(NAIVE, began)
                if (ids, overlap) != (await ours.route(warm))[1:]:
                    raise AnswersDifferError(f"request {number}: the naive way has an overlap of {overlap} blocks")
    finally:
        gc.unfreeze()
    return timed


def rows(label: str, timed: Timed) -> list[Row]:
    slow = percentile(timed.ms[NAIVE], 0.5)
    figures = []
    for way, goal in GOALS.items():
        fast = percentile(timed.ms[way], 0.5)
        words = f"naive: p50 {slow:.4g} ms, without the model's image processor"
        figures += [
            row(name(label, f"{way}, p50"), fast, "ms", goal=goal),
            row(name(label, f"{way}, p99"), percentile(timed.ms[way], 0.99), "ms"),
            row(name(label, f"{way}, below the naive way"), slow / fast, "x", peer=words),
        ]
    return figures


def name(label: str, what: str) -> str:
    return f"routing, {PROMPT_TOKENS} tokens and an image of 1 MB, {label}: {what}"


class Ours:
    """A router as its process wires it, with workers that hold prefixes of one conversation; nothing is sent."""

    def __init__(self, folder: Path) -> None:
        public, secret = zmq.curve_keypair()
        deployment = workload.deployment(replicas=WORKERS)
        curve = (CurveKeys(public, secret, public),)
        self.router = Router(
            Settings(deployment, "bench", "127.0.0.1", folder / "nowhere", folder, bytes(32), "key", "token", curve)
        )
        _, self.workers = workload.synced(WORKERS, fleet=self.router.fleet)

    async def route(self, raw: bytes) -> tuple[bytes, "array[int]", int]:
        prepared = await self.router.chat.prepare(CHAT, raw, DEFAULT)
        outgoing = self.router.chat._outgoing(prepared, DEFAULT.name)
        decision = self.router.placer.place(prepared)
        return outgoing.plain, prepared.ids, decision.choice.winner.overlap

    async def fill(self, raw: bytes) -> None:
        prepared = await self.router.chat.prepare(CHAT, raw, DEFAULT)
        keys = prepared.keys(BLOCK_SIZE)
        for number, worker in enumerate(self.workers):
            packed = pack_keys(keys[: held_count(number, len(keys))])
            self.router.fleet.on_published(worker, workload.delta(1, packed))

    async def close(self) -> None:
        await self.router.close()


class Naive:
    """The same request path by the standard library, an image decoder and a tokenizer."""

    def __init__(self, ours: Ours, raw: bytes) -> None:
        prompter, family = ours.router.preparer.prompter, ours.router.preparer.family
        assert isinstance(prompter, Prompter)
        assert family is not None
        self._prompter, self._family = prompter, family
        keys = self._keys(*self._prompt(json.loads(raw)))
        self._held = [set(keys[: held_count(number, len(keys))]) for number in range(WORKERS)]

    def route(self, raw: bytes) -> tuple["array[int]", int]:
        body = json.loads(raw)
        ids, identity = self._prompt(body)
        keys = self._keys(ids, identity)
        best = 0
        for held_keys in self._held:
            hits = [key in held_keys for key in keys]
            best = max(best, hits.index(False) if False in hits else len(keys))
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


class RequestBodies:
    """Bodies of requests: one conversation about one image, each with another last turn."""

    def __init__(self, ours: Ours) -> None:
        prompter = ours.router.preparer.prompter
        assert isinstance(prompter, Prompter)
        encode = prompter.tokenizer.encode
        self._jpeg = detailed_jpeg(IMAGE_BYTES)
        self._turns: list[dict[str, Any]] = []
        tokens = 0
        while tokens < PROMPT_TOKENS:
            text = f"{len(self._turns)}. {WORDS * 2}"
            tokens += len(encode(text, add_special_tokens=False).ids)
            role = ("assistant", "user")[len(self._turns) % 2]
            self._turns.append({"role": role, "content": text})

    def body(self, turn: int, *, image: int = 0) -> bytes:
        """Return a request whose last turn has this number; ``image``: another number is another image."""
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


def held_count(worker: int, blocks: int) -> int:
    """Return how many leading blocks of a prompt a worker holds; always less than all."""
    return random.Random(worker).randrange(blocks * 9 // 10)


def conversation(tokenizer: Tokenizer) -> str:
    """Return turns of at least ``PROMPT_TOKENS`` tokens in all."""
    text, tokens = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", 0
    while tokens < PROMPT_TOKENS:
        role = ("user", "assistant")[text.count("<|im_start|>") % 2 == 0]
        turn = f"<|im_start|>{role}\n{text.count('<|im_end|>')}. {WORDS * 2}<|im_end|>\n"
        text += turn
        tokens += len(tokenizer.encode(turn, add_special_tokens=False).ids)
    return text
