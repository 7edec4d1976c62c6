"""What the library says an engine will do with a chat (ids, spans, block keys), against what the engine published."""

from array import array
from base64 import b64decode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from conformance.engine_process import BLOCK_SIZE
from conformance.workload import Case

from mmrouter_lib import families
from mmrouter_lib.api import EngineType
from mmrouter_lib.block_keys import Span, block_keys, chain, namespace_seed
from mmrouter_lib.engines.base.adapter import ImageRewrite
from mmrouter_lib.engines.base.events import Batch, Cleared, Ragged, Stored
from mmrouter_lib.engines.prompters import PROMPTERS
from mmrouter_lib.engines.vllm.adapter import VLLM
from mmrouter_lib.families import Family, ProcessorLimits
from mmrouter_lib.image_size import probe
from mmrouter_lib.media_identity import media_identity, to_wire
from mmrouter_lib.prompt import AnyPrompter, PromptImage
from mmrouter_sidecar.blocks.window_block_keys import WindowBlocks

KEY = bytes(range(32))
MAX_PIXELS = 64_000_000


@dataclass(frozen=True)
class Predicted:
    """``ids`` and ``spans`` of the expanded prompt, and the seed of its chain. ``filled``: the ids as an engine has
    them that writes images' identities into them, in place of the spans.
    """

    ids: "array[int]"
    spans: tuple[Span, ...]
    seed: int
    filled: "array[int] | None" = None


@dataclass(frozen=True)
class Predictor:
    """The library's prediction for one model folder. The fields are what the deliberate breaks replace."""

    family: Family
    prompter: AnyPrompter
    model: str
    block_size: int
    key: bytes = KEY
    swapped: bool = False
    more: int = 0

    @classmethod
    def load(
        cls, model_dir: Path, block_size: int, engine: EngineType = "vllm", limits: ProcessorLimits | None = None
    ) -> Self:
        family = families.load_family(model_dir, limits)
        assert family is not None, f"{model_dir} is of no family that is modelled"
        prompter = PROMPTERS[engine].load(model_dir, family=family)
        return cls(prompter.family, prompter, model_dir.name, block_size)

    def predict(self, case: Case) -> Predicted:
        """Raises a ``ValueError`` of the library for a request that it refuses."""
        images = [self._image(url) for _, _, url in image_places(case)]
        expanded = self.prompter.prompt(case.body, list(reversed(images)) if self.swapped else images)
        return Predicted(expanded.ids, expanded.spans, self.seed(case.salt))

    def request(self, case: Case) -> dict[str, Any]:
        """Return the body that the engine is sent, with our identity beside every image."""
        rewrites = [
            ImageRewrite(at, number, url, to_wire(self._identity(decode(url))))
            for at, number, url in image_places(case)
        ]
        return VLLM.rewrite_chat(case.body, rewrites, model=self.model, cache_salt=case.salt).body

    def seed(self, salt: str | None) -> int:
        return namespace_seed(self.key, model=self.model, salt=salt)

    def keys(self, predicted: Predicted, answered: Sequence[int] = ()) -> "array[int]":
        if predicted.filled is not None:
            return block_keys(predicted.filled + array("Q", answered), self.block_size, (), predicted.seed)
        ids = predicted.ids + array("I", answered)
        return block_keys(ids, self.block_size, predicted.spans, predicted.seed)

    def _image(self, url: str) -> PromptImage:
        data = decode(url)
        size = probe(data, max_pixels=MAX_PIXELS, exif=self.family.rotates_exif)
        count = self.family.count(size.width, size.height) + self.more
        return PromptImage(self._identity(data), count, (size.width, size.height))

    def _identity(self, data: bytes) -> bytes:
        return media_identity(data, self.family.pixel_options, key=self.key)


def image_places(case: Case) -> list[tuple[int, int, str]]:
    return [
        (at, number, part["image_url"]["url"])
        for at, message in enumerate(case.body["messages"])
        for number, part in enumerate(message["content"] or ())
        if isinstance(part, dict) and part["type"] == "image_url"
    ]


def decode(url: str) -> bytes:
    return b64decode(url.partition(",")[2])


@dataclass(frozen=True)
class Exchange:
    """A request and what the engine said of it. ``answer_ids``: the generated tokens that it computed with, so without
    the last one, which was sampled and never fed back. ``image_tokens``: those of the prompt.
    """

    case: Case
    prompt_ids: list[int]
    answer_ids: list[int]
    cached_tokens: int
    image_tokens: int


@dataclass
class Report:
    """Counts of published blocks: those compared, those predicted (``matched``), and events that name fewer blocks than
    they have tokens (``ragged``). ``mismatches`` names every difference.
    """

    mismatches: list[str] = field(default_factory=list)
    requests: int = 0
    blocks: int = 0
    matched: int = 0
    ragged: int = 0

    @property
    def line(self) -> str:
        return f"requests {self.requests}, blocks compared {self.blocks}, mismatches {len(self.mismatches)}"


class Published:
    """What an engine's events say that it holds, in our keys, which are rebuilt from its tokens, identities and
    parents. ``keys``: key -> where it was first published, in that order; ``stored``: the key of every block of a store
    event, re-stored ones again; ``ragged``: events that name fewer blocks than they have tokens.
    """

    def __init__(self, batches: Iterable[Batch], predictor: Predictor) -> None:
        self.keys: dict[int, str] = {}
        self.stored: list[int] = []
        self.ragged = 0
        self.faults: list[str] = []
        self._predictor, self._windows = predictor, WindowBlocks()
        self._by_hash: dict[int, int] = {}
        for number, batch in enumerate(batches):
            for event in batch.events:
                self._take(event, f"batch {number}")

    def _take(self, event: Any, where: str) -> None:
        if isinstance(event, Stored):
            self._add_stored(event, where)
        elif isinstance(event, Ragged):
            # The event does not say which of its tokens its blocks are: the sidecar's own code finds out.
            placed = self._windows.place(event, lambda _, salt: self._predictor.seed(salt))
            if placed.rest:
                self.faults.append(f"{where}: {len(placed.rest)} hashes of a ragged event are not explained")
            self.ragged += 1
            self._add(placed.hashes, placed.keys, where)
        elif not isinstance(event, Cleared) or self._by_hash:  # SGLang is cleared once when it starts
            # The cache is far larger than the workload, so an eviction means that something else is going on.
            self.faults.append(f"{where}: {event}")

    def _add_stored(self, event: Stored, where: str) -> None:
        if event.block_size != self._predictor.block_size:
            self.faults.append(f"{where}: block size {event.block_size}, predicted with {self._predictor.block_size}")
        if event.parent is None:
            parent = self._predictor.seed(event.salt)
        elif event.parent in self._by_hash:
            parent = self._by_hash[event.parent]
        elif (followed := self._windows.key(event.parent)) is not None:
            parent = followed
        else:
            self.faults.append(f"{where}: parent {event.parent} was never published")
            return
        keys = chain(event.ids, event.block_size, len(event.hashes), event.extras, parent)
        if event.window:
            self._windows.follow(event, keys)
        self._add(event.hashes, keys, where)

    def _add(self, hashes: Sequence[int], keys: Sequence[int], where: str) -> None:
        self.stored += keys
        for place, (engine_hash, key) in enumerate(zip(hashes, keys, strict=True)):
            if self._by_hash.setdefault(engine_hash, key) != key:
                self.faults.append(f"{where}, block {place}: one engine hash, two keys")
            self.keys.setdefault(key, f"{where}, block {place}")
        if len(set(self._by_hash.values())) != len(self._by_hash):
            self.faults.append(f"{where}: two engine hashes, one key")


def compare(exchanges: Sequence[Exchange], batches: Sequence[Batch], predictor: Predictor) -> Report:
    """Compare every id, key and ``cached_tokens`` of a run without evictions that began with an empty cache."""
    seen = Published(batches, predictor)
    report = Report(seen.faults, requests=len(exchanges), blocks=len(seen.stored), ragged=seen.ragged)
    held: dict[int, None] = {}
    order = {key: number for number, key in enumerate(seen.keys)}
    for exchange in exchanges:
        report.mismatches += (
            f"{exchange.case.name}: {text}"
            for text in _compare_one(exchange, predictor, held, order, windowed=seen.ragged > 0)
        )
    report.matched = sum(key in held for key in seen.stored)
    report.mismatches += (f"{where}: published, never predicted" for key, where in seen.keys.items() if key not in held)
    return report


def _compare_one(
    exchange: Exchange, predictor: Predictor, held: dict[int, None], order: dict[int, int], *, windowed: bool
) -> Iterable[str]:
    """``held`` are the keys of the requests so far, in order: a new key must be the next that was published.
    ``windowed``: an engine with a sliding window keeps what a repeat of the prompt can use, so neither the block that
    holds its last token nor any after it, unless another prompt goes on there
    (docs/engine-facts/vllm.md#sliding-windows).
    """
    predicted = predictor.predict(exchange.case)
    ids = exchange.prompt_ids
    if predicted.ids.tolist() != ids:
        at = next((n for n, (a, b) in enumerate(zip(predicted.ids, ids, strict=False)) if a != b), None)
        yield f"{len(predicted.ids)} ids predicted, {len(ids)} returned, the first difference at {at}"
    size = predictor.block_size
    prompt_keys = predictor.keys(predicted)
    overlap = next((n for n, key in enumerate(prompt_keys) if key not in held), len(prompt_keys))
    # The last token is always computed, so a prompt of exactly n blocks hits n - 1
    # (docs/engine-facts/vllm.md#expanded-token-ids).
    hit = min(overlap, (len(ids) - 1) // size) * size
    if hit != exchange.cached_tokens:
        yield f"{hit} cached tokens predicted, {exchange.cached_tokens} reported"
    image_tokens = sum(span.run * len(span.starts) for span in predicted.spans)
    if image_tokens != exchange.image_tokens:
        yield f"{image_tokens} image tokens predicted, {exchange.image_tokens} reported"
    for number, key in enumerate(predictor.keys(predicted, exchange.answer_ids)):
        if key not in held and order.get(key) != len(held):
            if windowed and number >= (len(ids) - 1) // size:
                return
            yield (
                f"block {number} predicted as new block {len(held)} of the run, published as {order[key]}"
                if key in order
                else f"block {number} predicted, never published"
            )
        held[key] = None


def repeats(sent: Iterable[tuple[Case, int, int]]) -> tuple[int, int]:
    """Return, over all requests that were sent before word for word, the blocks that hit and those that could.
    ``sent``: each request with its cached tokens and its prompt's tokens, in order.
    """
    seen: set[str] = set()
    hits = most = 0
    for case, cached, tokens in sent:
        words = repr((case.body, case.salt))
        if words in seen:
            hits += cached // BLOCK_SIZE
            most += (tokens - 1) // BLOCK_SIZE
        seen.add(words)
    return hits, most
