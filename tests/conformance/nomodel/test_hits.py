"""vLLM's own scheduler and cache manager behind a sidecar and a router, for every layout of cache groups.

Each drawn request is predicted from the events before it and then run: the promise is never above the tokens that the
engine has, and is equal wherever the events tell all. ``MMROUTER_NOMODEL_REQUESTS`` sets the requests per layout.
"""

import os
import random
import struct
import subprocess
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from artefacts import ROOT, Record
from conformance.nomodel.prompts import Drawn, Prompts

from mmrouter_lib import feed
from mmrouter_lib.block_keys import block_keys
from mmrouter_lib.media_identity import to_wire
from mmrouter_router.fleet.cache_query import cache_query
from mmrouter_router.fleet.workers import Fleet, Member, Target
from mmrouter_router.telemetry.metrics import Metrics as RouterMetrics
from mmrouter_sidecar.engine.event_order import digest_of
from mmrouter_sidecar.feed.relay import EventRelay
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import CurveKeys, Settings

REQUESTS = int(os.environ.get("MMROUTER_NOMODEL_REQUESTS", "300"))
SCRIPT = Path(__file__).with_name("engine_steps.py")
MODEL = ROOT / "examples" / "models" / "tiny-qwen2-vl"  # of its folder, vLLM reads the configuration only
EQUAL = 0.995  # share of promises that are the engine's hit, where the events tell all

Layers = list[tuple[str, dict[str, int]]]
FULL: Layers = [("full", {})]


def windows(*sizes: int) -> Layers:
    return [("window", {"sliding_window": size}) for size in sizes]


MAMBA: Layers = [("mamba", {})]
LAYOUTS: dict[str, tuple[Layers, int, int]] = {
    "full attention": (FULL * 2, 32, 400),
    "MLA": ([("mla", {})], 32, 400),
    "windows of 1024 beside full attention": (windows(*[1024] * 5) + FULL, 32, 1500),
    "windows of 64 beside full attention": (windows(*[64] * 5) + FULL, 16, 1200),
    "windows of 64 and 512 beside full attention": (windows(64, 512, 64, 512) + FULL * 2, 32, 900),
    "mamba beside full attention": (MAMBA * 3 + FULL, 64, 300),
    "mamba and windows beside full attention": (MAMBA * 2 + windows(256) + FULL, 64, 400),
    "windows of 256 alone": (windows(256) * 2, 32, 300),
    "chunks of 512 beside full attention": ([("chunked", {"attention_chunk_size": 512})] * 3 + FULL, 32, 900),
    "full attention, EAGLE": (FULL * 2, 32, 400),
    "windows of 512 beside full attention, EAGLE": (windows(*[512] * 5) + FULL, 32, 1200),
    "mamba beside full attention, EAGLE": (MAMBA * 3 + FULL, 64, 300),
}
"""Layers, block size in tokens, and blocks: few enough that they are evicted."""
BOUNDED = {"windows of 256 alone", "chunks of 512 beside full attention"}
"""Layouts of which the events do not tell all: images that ended before a window, and how long a chunk is."""


class EngineProcess:
    """The engine's environment, in which one layout after another is driven."""

    def __init__(self, python: Path) -> None:
        command = [str(python), str(SCRIPT), str(MODEL)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, message: Any) -> Any:
        asked, answers = self.process.stdin, self.process.stdout
        assert asked is not None
        assert answers is not None
        raw = msgspec.msgpack.encode(message)
        asked.write(struct.pack("<I", len(raw)) + raw)
        asked.flush()
        head = answers.read(4)
        assert head, "the engine's process ended"
        return msgspec.msgpack.decode(answers.read(*struct.unpack("<I", head)))

    def run(self, prompt: Drawn) -> Any:
        images = [(to_wire(image.identity), image.offset, image.length) for image in prompt.images]
        limits = {"output": prompt.output, "steps": prompt.steps}
        return self.ask({"ids": prompt.ids, "images": images, "salt": prompt.salt, "lora": prompt.lora, **limits})


class Followed:
    """A sidecar's relay and a router's fleet, over the wire's form of the feed."""

    def __init__(self, folder: Path, drafter: str) -> None:
        pod, keys = ("uid", "127.0.0.1", "127.0.0.1"), CurveKeys(b"", b"", ())
        self.settings = Settings(
            *pod, "vllm", "m", "main", 1, bytes(range(32)), keys, *[folder] * 4, buffer_events=10_000, drafter=drafter
        )
        self._frames: list[feed.Published] = []
        self.relay = EventRelay(self.settings, Metrics(), self._frames.append)
        self.fleet = Fleet(RouterMetrics())
        self.worker = self.fleet.join(Member("uid", "w", "127.0.0.1", "worker", "worker"))
        self._answer(self.fleet.feed_connected(self.worker))
        self._batches = 0

    def apply(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            self.relay.batch(0, self._batches, payload, digest_of(payload))
            self._batches += 1
        self.relay.flush()
        while self._frames:
            frame = feed.decode_published(feed.encode(self._frames.pop(0)))
            self._answer(self.fleet.on_published(self.worker, frame))

    def promised(self, prompt: Drawn) -> int:
        """Return the tokens that a router expects the engine to have."""
        if not (size := self.relay.ledger.block_size):
            return 0
        hits = self.fleet.lookup(self._keys(prompt), len(prompt.ids), cache_query([Target(self.worker, 0, size)]))
        return min(hits[self.worker.slots[0]], (len(prompt.ids) - 1) // size) * size

    def of_primary_alone(self, prompt: Drawn) -> int:
        """Return the tokens that an index of one group expects, which holds every block of a hit."""
        if not (size := self.relay.ledger.block_size):
            return 0
        slot = self.worker.slots[0]
        return min(self.fleet.index.match(self._keys(prompt), [slot])[slot], (len(prompt.ids) - 1) // size) * size

    def _keys(self, prompt: Drawn) -> "array[int]":
        size, seed = self.relay.ledger.block_size, self.settings.seed(prompt.lora, prompt.salt)
        return block_keys(array("I", prompt.ids), size, prompt.images, seed, self.worker.layout.lookahead)

    def _answer(self, requests: Sequence[feed.Request]) -> None:
        waiting = list(requests)
        while waiting:
            for reply in self.relay.answer(feed.decode_request(feed.encode(waiting.pop(0)))):
                waiting += self.fleet.on_reply(self.worker, feed.decode_reply(feed.encode(reply)))


@pytest.fixture(scope="module")
def engine(vllm_env: Path) -> Iterator[EngineProcess]:
    with running(vllm_env) as started:
        yield started


@pytest.fixture(scope="module")
def newer_engine(newer_vllm_env: Path) -> Iterator[EngineProcess]:
    with running(newer_vllm_env) as started:
        yield started


@contextmanager
def running(env: Path) -> Iterator[EngineProcess]:
    started = EngineProcess(env / "bin" / "python")
    yield started
    started.process.kill()
    started.process.wait()


@pytest.mark.parametrize("name", LAYOUTS)
def test_case_45_no_promise_is_above_the_engines_hit_and_nearly_all_are_equal(
    engine: EngineProcess, name: str, tmp_path: Path, record: Record
) -> None:
    compare(engine, name, tmp_path, record)


@pytest.mark.long_form
@pytest.mark.parametrize("name", LAYOUTS)
def test_case_45_the_same_holds_where_hashes_cover_the_next_tokens(
    newer_engine: EngineProcess, name: str, tmp_path: Path, record: Record
) -> None:
    compare(newer_engine, name, tmp_path, record, lookahead=int(name.endswith("EAGLE")))


def compare(engine: EngineProcess, name: str, folder: Path, record: Record, *, lookahead: int = 0) -> None:
    """Drive an engine and a router by drawn requests. ``lookahead``: tokens after a block that its hash covers."""
    layers, block_size, blocks = LAYOUTS[name]
    drafts = name.endswith("EAGLE")
    method = "eagle" if drafts else ""
    groups = engine.ask({"layers": layers, "block_size": block_size, "blocks": blocks, "drafter": method})
    followed = Followed(folder, "drops" if drafts else "")
    prompts = Prompts(random.Random(name), block_size)
    seen: Counter[str] = Counter()
    above: list[tuple[Drawn, int, int]] = []
    for _ in range(REQUESTS):
        prompt = prompts.next()
        promised, answer = followed.promised(prompt), engine.run(prompt)
        cached = answer["cached"]
        seen.update(["equal" if promised == cached else "below" if promised < cached else "above"], hit=cached > 0)
        seen.update(promised_tokens=promised, hit_tokens=cached)
        seen["full attention alone above"] += followed.of_primary_alone(prompt) > cached
        if promised > cached:
            above.append((prompt, promised, cached))
        followed.apply(answer["batches"])
        prompts.answered(prompt, answer["output"])
    counts = {reason: n for reason, n in followed.relay.ledger.counts.items() if reason not in ("stored", "removed")}
    ahead = f", lookahead {lookahead}" * bool(lookahead)
    record(f"vLLM without a model, {name}{ahead}, {len(groups)} groups", {**seen, **counts})
    assert not above
    assert followed.worker.layout.lookahead == lookahead
    drops = drafts and not lookahead
    assert seen["hit"] > REQUESTS / 8
    assert followed.relay.ledger.counts["removed"], "nothing was evicted"
    assert bool(followed.worker.layout.bounds) == (name.startswith("chunks") or (drops and name.startswith("windows")))
    if "beside" in name or drops:
        assert seen["full attention alone above"] > REQUESTS / 40
    if name not in BOUNDED:
        assert seen["equal"] >= EQUAL * REQUESTS
        assert not counts
