"""Random mixes of resolved and unresolved images: the router's predictions against a simulated engine.

The truth is the pure core of the simulated engine, which hashes blocks by code of its own and evicts them; the
prediction is the product's: the sidecar's ledger over the engine's encoded events, the router's index, and the keys of
a prepared request. Everything follows from one seed. No clock, no sockets. tests/local runs 10,000 cases.
"""

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from mmrouter_lib.block_keys import namespace_seed
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_lib.media_identity import to_wire
from mmrouter_lib.prompt import PromptImage, expand_ids
from mmrouter_router.fleet.index import Index
from mmrouter_router.media.content import Media as Bytes
from mmrouter_router.request.prepared import Prepared, ResolvedImage
from mmrouter_sidecar.blocks.ledger import Ledger
from mmrouter_sim.core.events import encode_events
from mmrouter_sim.core.requests import Media, Request
from mmrouter_sim.core.scheduler import Limits, Scheduler

CASES = 300


def test_predicted_overlap_never_exceeds_the_true_one():
    hits = 0
    for case in range(CASES):
        for number, one in enumerate(play(case)):
            assert one.over == 0, (case, number, one)
            # All blocks before the first unresolved image are predicted.
            assert one.predicted == min(one.held, one.sure), (case, number, one)
            hits += one.predicted
    assert hits > CASES


def test_trusting_unresolved_images_overestimates_overlap():
    def trusting(image: ResolvedImage) -> PromptImage:
        return PromptImage(image.identity, image.tokens)

    assert sum(one.over > 0 for case in range(CASES) for one in play(case, in_prompt=trusting)) > 5


PLACEHOLDER = 9
KEY = bytes(32)
LONGEST = 110  # tokens: five texts, five images and the answer
SEED = namespace_seed(KEY, model="m")

InPrompt = Callable[[ResolvedImage], PromptImage]


@dataclass(frozen=True)
class Compared:
    """One request: blocks predicted as held, and those held."""

    predicted: int
    held: int
    sure: int  # blocks before the first unresolved image, all without one

    @property
    def over(self) -> int:
        return max(self.predicted - self.held, 0)


class World:
    """One engine, sidecar and router, and the texts and images of all requests."""

    def __init__(self, seed: int, in_prompt: InPrompt) -> None:
        self._rng = rng = random.Random(seed)
        self._in_prompt = in_prompt
        self._size = rng.choice((2, 4, 8))
        # Capacity for little more than the longest prompt, so that blocks are evicted, or for all of them.
        blocks = LONGEST // self._size + 2 + rng.choice((0, 8, 200))
        limits = Limits(blocks, self._size, max_model_len=(blocks - 1) * self._size, max_batched_tokens=64)
        self._engine = Scheduler(limits)
        self._ledger = Ledger(lambda lora, salt: namespace_seed(KEY, model="m", lora=lora, salt=salt))
        self._index = Index()
        self._slot = self._index.join()
        self._texts = [[rng.randrange(10, 14) for _ in range(rng.randrange(1, 12))] for _ in range(2)]
        self._images = [(bytes([number]) * 32, rng.randrange(1, 10)) for number in range(2)]
        self._number = 0

    def send(self) -> Compared:
        """Predict one request, compare with the engine's blocks, and let the engine serve it."""
        ids, images, true = self._draw()
        expanded = expand_ids(ids, PLACEHOLDER, [self._in_prompt(image) for image in images])
        prepared = Prepared(None, None, tuple(images), expanded.ids, expanded.spans, "exact", (), SEED, 0)  # type: ignore[arg-type]
        keys = prepared.keys(self._size)
        predicted = self._index.match(keys, [self._slot])[self._slot]
        request = self._request(ids, true)
        held = self._serve(request)
        first = next((n for n, image in enumerate(images) if not image.resolved), None)
        sure = len(keys) if first is None else expanded.spans[first].offset // self._size
        return Compared(predicted, held, sure)

    def _draw(self) -> tuple["array[int]", list[ResolvedImage], list[PromptImage]]:
        """Return a prompt, its images as the router sees them, and as the engine does (identity and count)."""
        rng = self._rng
        ids = array("I")
        images: list[ResolvedImage] = []
        true: list[PromptImage] = []
        spoiled = rng.random() < 0.2
        for number in range(rng.randrange(1, 6)):
            ids.extend(rng.choice(self._texts))
            if rng.random() < 0.6:
                identity, count = rng.choice(self._images)
                ids.append(PLACEHOLDER)
                lost = spoiled or rng.random() < 0.2
                # An unresolved image often has the guessed length, under the same or another identity.
                found = count if not lost or rng.random() < 0.5 else rng.randrange(1, 10)
                name = identity if not lost or rng.random() < 0.3 else bytes([rng.randrange(100, 103)]) * 32
                media = Bytes(b"x", "image/png", "data")
                why = "processor_options:mm_processor_kwargs" if lost else ""
                images.append(ResolvedImage(0, number, "", media, identity, 1, 1, count, why))
                true.append(PromptImage(name, found))
        return ids, images, true

    def _request(self, ids: "array[int]", true: list[PromptImage]) -> Request:
        self._number += 1
        expanded = expand_ids(ids, PLACEHOLDER, true)
        media = tuple(Media(to_wire(s.identity), s.offset, s.length) for s in expanded.spans)
        return Request(str(self._number), expanded.ids, lambda place: 20 + place, max_tokens=3, media=media)

    def _serve(self, request: Request) -> int:
        """Run a request and apply its events. Returns the leading blocks held before it ran."""
        engine = self._engine
        engine.add(request)
        held = 0
        for digest in request.digests:
            if engine.pool.find(digest) is None:
                break
            held += 1
        now = 0.0
        while (step := engine.schedule()) is not None:
            now += step.seconds
            _, events = engine.complete(step)
            self._ledger.apply(decode_batch(encode_events(now, events, 0)), 0)
            for change in self._ledger.take().changes:
                self._index.remove(self._slot, change.removed)
                self._index.store(self._slot, change.stored)
        assert request.finished == "length"
        assert (request.cached_tokens or 0) // self._size <= held
        return held


def play(seed: int, requests: int = 5, in_prompt: InPrompt = ResolvedImage.in_prompt) -> list[Compared]:
    """Return the comparisons of one random sequence of requests."""
    world = World(seed, in_prompt)
    return [world.send() for _ in range(requests)]
