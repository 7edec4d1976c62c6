"""A real vLLM with a window far below its context, behind a sidecar and a router: hits are never over-estimated.

Qwen2-VL's text configuration has a window that is switched off as published; here it is on and 1,024 tokens wide. The
engine then keeps and announces only the last window of blocks before a prompt's end, and a hit needs no others
(docs/engine-facts/vllm.md#sliding-windows). The cache is small, so blocks are evicted as well.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.conftest import Shrunk
from conformance.engine_process import BLOCK_SIZE, engine_args, require_memory
from conformance.engines import AGREE_SECONDS, Answer, deployed, manifest, pool, send
from conformance.event_listener import replay
from conformance.prediction import Predictor
from conformance.setups import TINY
from conformance.window_engine import WindowEngine
from conformance.workload import STORY, Case, case, image_part, picture, said, user
from local.rig import Deployment, samples
from waiting import wait_for

from mmrouter_lib.block_keys import namespace_seed
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_sidecar.blocks.ledger import Ledger
from mmrouter_sidecar.blocks.ledger_ops import Place
from mmrouter_sim.core.requests import Media

pytestmark = pytest.mark.long_form  # ``nomodel/test_hits.py`` has the same windows in vLLM's cache manager alone

WINDOW, CONTEXT, STEP = 1024, 4096, 512
CACHE_BLOCKS = 160  # the longest prompt needs 49 at a time; the last windows of about four conversations stay
REQUESTS = 56
KINDS = ("new", "longer", "repeat", "shorter", "other tail", "cut text")
CAUSES = ("ragged_store", "unknown_parent")
IMAGES = ((112, 112), (224, 224), (448, 448), (640, 480))


@pytest.fixture(scope="module")
def folder(shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its window switched on for every layer: vLLM takes no Qwen2 whose layers differ in that."""
    source, out = shrunk(TINY), tmp_path_factory.mktemp("window") / "model"
    out.mkdir()
    for file in source.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((out / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def deployment(vllm_env: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    require_memory()
    steps, blocks = f"--max-num-batched-tokens={STEP}", f"--num-gpu-blocks-override={CACHE_BLOCKS}"
    engine = {"type": "vllm", "args": [*engine_args(CONTEXT), steps, blocks]}
    made = manifest(folder, engine, [pool("worker")], repository=TINY)
    with deployed(vllm_env, tmp_path_factory.mktemp("sliding"), made) as deployment:
        wait_for(deployment.settled, AGREE_SECONDS, "the engine is verified")
        yield deployment


@dataclass
class Talk:
    """Draws requests: new conversations and longer ones, repeats, prefixes of old ones, and other tails of them."""

    predictor: Predictor
    draw: random.Random = field(default_factory=lambda: random.Random(1024))
    old: list[list[dict[str, Any]]] = field(default_factory=list)

    def far(self) -> Iterator[tuple[str, Case]]:
        """Yield prompts whose first steps leave nothing in the cache, without and with an image there, and repeats."""
        text = self._text(1800)
        for name, parts in (("text", (text,)), ("image and text", (image_part(picture(*IMAGES[0])), text))):
            self.old.append([user(*parts)])
            yield "far", case(f"{name} beyond the window", *self.old[-1])
            yield "far", case(f"{name} beyond the window again", *self.old[-1])

    def cases(self, count: int) -> Iterator[tuple[str, Case]]:
        made = 0
        while made < count:
            kind = self.draw.choice((*KINDS, "longer", "longer")) if self.old else "new"
            talk = self._next(kind)
            one = case(f"{made} {kind}", *talk)
            if len(self.predictor.predict(one).ids) > CONTEXT - 8:
                self.old.pop(0)
                continue
            self.old = [*(other for other in self.old if other != talk), talk][-6:]
            made += 1
            yield kind, one

    def _next(self, kind: str) -> list[dict[str, Any]]:
        if kind == "new":
            head = [said("system", self._text(self.draw.choice((10, 300))))] if self.draw.random() < 0.5 else []
            return [*head, self._turn()]
        talk = self.draw.choice(self.old[-3:] if kind == "longer" else self.old)
        asked = [number for number, one in enumerate(talk) if one["role"] == "user"]
        if kind == "longer":
            return [*talk, said("assistant", self._text(20)), self._turn()]
        if kind == "shorter":
            return talk[: self.draw.choice(asked) + 1]
        if kind == "other tail":
            return [*talk[: self.draw.choice(asked)], self._turn()]
        if kind == "cut text" and isinstance(talk[-1]["content"], str):
            words = talk[-1]["content"].split()
            return [*talk[:-1], user(" ".join(words[: self.draw.randint(1, len(words))]))]
        return talk

    def _turn(self) -> dict[str, Any]:
        text = self._text(self.draw.choice((20, 150, 500, 1200)))
        if self.draw.random() < 0.6:
            return user(text)
        shown = image_part(picture(*self.draw.choice(IMAGES), seed=self.draw.randint(1, 4)))
        return user(text, shown, self._text(20)) if self.draw.random() < 0.3 else user(shown, text)

    def _text(self, words: int) -> str:
        return " ".join(self.draw.choices(STORY.split(), k=words))


class Followed:
    """The engine's replayed event history: by engine hash, and by a ledger of the sidecar's code."""

    def __init__(self, deployment: Deployment) -> None:
        (self.worker,) = deployment.state()["workers"]
        self._deployment = deployment
        self.engine = WindowEngine(WINDOW, BLOCK_SIZE)
        config = Path(next(iter(deployment.processes("router").values())).environ()["MMROUTER_CONFIG"])
        model = json.loads((config / "deployment.json").read_text())["spec"]["model"]
        key = (config / "secrets" / "identity.key").read_bytes()
        seed = partial(namespace_seed, key, model=TINY, revision=model.get("revision", "main"))
        self.ledger = Ledger(lambda lora, salt: seed(lora=lora, salt=salt))
        self.messages = 0
        self.indexed: set[str] = set()
        """Keys that the router's index had at any time."""

    def settle(self) -> None:
        """Read what was published, and wait until the router's index is what the sidecar's code makes of it.

        The second replay has all that an answered request published: the thread that replays moves a message from its
        queue into its memory between two replays, and an engine's step has one message, sent before its answer.
        """
        replay(self.worker["ip"])
        history = replay(self.worker["ip"])
        for _, payload in history[self.messages :]:
            self.engine.apply(payload)
            self.ledger.apply(decode_batch(payload), 0)
        self.messages = len(history)
        table = self.ledger.tables.get(Place(0, 0, "GPU"))
        held = {f"{key:016x}" for key in table.blocks.values()} if table else set()

        def agree() -> bool:
            return held == set(self._deployment.keys(self.worker["uid"])["keys"].get("0", ()))

        wait_for(agree, AGREE_SECONDS, "the router's index is what the engine published")
        self.indexed |= held

    def sidecar_counts(self) -> Counter[str]:
        ip = self.worker["ip"]
        return Counter({each.labels["what"]: int(each.value) for each in samples(ip, "mmrouter_sidecar_events_total")})


@dataclass(frozen=True)
class Asked:
    """An answered request. ``by_rule``: the tokens that the rule finds in what the engine had published before it."""

    kind: str
    answer: Answer
    by_rule: int

    @property
    def images(self) -> int:
        return len(self.answer.decision["images"])


@dataclass(frozen=True)
class Run:
    followed: Followed
    before: frozenset[str]  # keys of the canary
    asked: list[Asked]


@pytest.fixture(scope="module")
def run(deployment: Deployment, folder: Path) -> Run:
    predictor, followed = Predictor.load(folder, BLOCK_SIZE), Followed(deployment)
    followed.settle()
    made = Run(followed, frozenset(followed.indexed), [])
    for kind, one in (*(talk := Talk(predictor)).far(), *talk.cases(REQUESTS)):
        ids = predictor.predict(one).ids.tolist()
        answer = send(deployment, one, max_tokens=1)
        images = [Media(each["identity"], each["offset"], each["tokens"]) for each in answer.decision["images"]]
        # Of an image that ended before the window nothing may be known.
        expected = "bounded" if images and len(ids) > WINDOW else "exact"
        assert (answer.exactness, answer.tokens) == (expected, len(ids)), one.name
        made.asked.append(Asked(kind, answer, followed.engine.hit(ids, images)))
        followed.settle()
    return made


def test_the_engine_keeps_a_window_and_announces_parts_of_prompts(run: Run, record: Record) -> None:
    """Otherwise the comparisons below would prove little."""
    engine = run.followed.engine
    assert engine.groups == {(0, "sliding_window", WINDOW)}
    events = {"ragged": engine.ragged, "without a block": engine.empty, "parent never stored": engine.orphans}
    record("sliding window: events", events)
    record("sliding window: blocks stored and removed", (engine.published, engine.removed))
    assert all(events.values())
    assert engine.removed > CACHE_BLOCKS
    assert {one.kind for one in run.asked} == {"far", *KINDS}
    assert any(one.images and 0 < one.answer.cached < one.answer.most for one in run.asked)


def test_every_hit_is_the_one_of_the_rule(run: Run) -> None:
    assert [(one.kind, one.by_rule, one.answer.cached) for one in run.asked if one.by_rule != one.answer.cached] == []


def test_case_45_no_more_is_promised_than_is_hit(run: Run, record: Record) -> None:
    equal = sum(one.answer.promised == one.answer.cached for one in run.asked)
    tokens = tuple(
        sum(values) for values in zip(*((a.answer.promised, a.answer.cached) for a in run.asked), strict=True)
    )
    record("sliding window: hits predicted exactly, of all", (equal, len(run.asked)))
    record("sliding window: tokens promised, hit", tokens)
    above = [(one.kind, one.answer.promised, one.answer.cached) for one in run.asked]
    assert [one for one in above if one[1] > one[2]] == []
    assert equal > len(run.asked) / 2


def test_text_is_predicted_exactly(run: Run) -> None:
    """What lies before the window is recomputed where it is text; an image there is in no event."""
    texts = [(one.answer.promised, one.answer.cached) for one in run.asked if not one.images]
    assert [pair for pair in texts if pair[0] != pair[1]] == []
    assert sum(cached > WINDOW for _, cached in texts) > 0


def test_every_published_block_is_predicted_or_counted_by_its_cause(run: Run, record: Record) -> None:
    counts, followed = run.followed.sidecar_counts(), run.followed
    assert counts == followed.ledger.counts, "the sidecar counted the same history"
    record("sliding window: blocks by outcome", dict(counts))
    assert set(counts) <= {"stored", "removed", *CAUSES}
    assert followed.engine.published == counts["stored"] + sum(counts[cause] for cause in CAUSES)
    assert followed.engine.removed == counts["removed"]
    predicted = {key for one in run.asked for key in one.answer.keys}
    assert followed.indexed - run.before <= predicted, "what was not predicted was not indexed"
    assert followed.indexed & predicted
