"""Predicted block keys against those that an engine published, over one recorded run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.predict import Predictor
from conformance.workload import Case

from mmrouter.blocks import chain
from mmrouter.engines.events import Batch, Cleared, Removed, Stored


@dataclass(frozen=True)
class Exchange:
    """A request and the engine's answer to it, in the order in which they were sent one after the other."""

    case: Case
    answer: dict[str, Any]

    @property
    def prompt_ids(self) -> list[int]:
        return list(self.answer["prompt_token_ids"])

    @property
    def answer_ids(self) -> list[int]:
        """The generated tokens that the engine computed with: the last one was sampled and never fed back."""
        return list(self.answer["choices"][0]["token_ids"])[:-1]

    @property
    def cached_tokens(self) -> int:
        return int(self.answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@dataclass
class Published:
    """What an engine's events say that it holds, in our keys."""

    keys: dict[int, str] = field(default_factory=dict)  # key -> where it was first published, in that order
    stores: int = 0  # blocks in store events, re-stored ones counted again
    faults: list[str] = field(default_factory=list)


@dataclass
class Report:
    """``blocks`` counts published blocks that were compared; ``mismatches`` names every difference."""

    requests: int = 0
    blocks: int = 0
    predicted: int = 0
    mismatches: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        return f"requests {self.requests}, blocks compared {self.blocks}, mismatches {len(self.mismatches)}"


def published(batches: Iterable[Batch], predictor: Predictor) -> Published:
    """Rebuild the keys of every stored block from the engine's tokens, identities and parents."""
    seen = Published()
    by_hash: dict[int, int] = {}
    for number, batch in enumerate(batches):
        for event in batch.events:
            if isinstance(event, Stored):
                _add_stored(event, f"batch {number}", predictor, by_hash, seen)
            else:
                # The cache is far larger than the workload, so an eviction means that something else is going on.
                kind = (
                    "removed" if isinstance(event, Removed) else "cleared" if isinstance(event, Cleared) else "ignored"
                )
                seen.faults.append(f"batch {number}: {kind}: {event}")
    return seen


def _add_stored(event: Stored, where: str, predictor: Predictor, by_hash: dict[int, int], seen: Published) -> None:
    if event.block_size != predictor.block_size:
        seen.faults.append(f"{where}: block size {event.block_size}, predicted with {predictor.block_size}")
    if event.parent is None:
        parent = predictor.seed(event.salt)
    elif event.parent in by_hash:
        parent = by_hash[event.parent]
    else:
        seen.faults.append(f"{where}: parent {event.parent} was never published")
        return
    keys = chain(event.ids, event.block_size, len(event.hashes), event.extras, parent)
    seen.stores += len(keys)
    for place, (engine_hash, key) in enumerate(zip(event.hashes, keys, strict=True)):
        if by_hash.setdefault(engine_hash, key) != key:
            seen.faults.append(f"{where}, block {place}: one engine hash, two keys")
        seen.keys.setdefault(key, f"{where}, block {place}")
    if len(set(by_hash.values())) != len(by_hash):
        seen.faults.append(f"{where}: two engine hashes, one key")


def compare(exchanges: Sequence[Exchange], batches: Sequence[Batch], predictor: Predictor) -> Report:
    """Compare every id, key and ``cached_tokens`` of a run without evictions that began with an empty cache."""
    seen = published(batches, predictor)
    report = Report(requests=len(exchanges), blocks=seen.stores, mismatches=list(seen.faults))
    held: dict[int, None] = {}
    order = {key: number for number, key in enumerate(seen.keys)}
    for exchange in exchanges:
        report.mismatches += (
            f"{exchange.case.name}: {text}" for text in _compare_one(exchange, predictor, held, order)
        )
    report.predicted = len(held)
    report.mismatches += (f"{where}: published, never predicted" for key, where in seen.keys.items() if key not in held)
    return report


def _compare_one(
    exchange: Exchange, predictor: Predictor, held: dict[int, None], order: dict[int, int]
) -> Iterable[str]:
    """``held`` are the keys of the requests so far, in order: a new key must be the next that was published."""
    predicted = predictor.predict(exchange.case)
    ids = exchange.prompt_ids
    if predicted.ids.tolist() != ids:
        at = next((n for n, (a, b) in enumerate(zip(predicted.ids, ids, strict=False)) if a != b), None)
        yield f"{len(predicted.ids)} ids predicted, {len(ids)} returned, the first difference at {at}"
    prompt_keys = predictor.keys(predicted)
    overlap = next((n for n, key in enumerate(prompt_keys) if key not in held), len(prompt_keys))
    # The last token is always computed, so a prompt of exactly n blocks hits n - 1 (facts on vLLM 4.2).
    hit = min(overlap, (len(ids) - 1) // predictor.block_size) * predictor.block_size
    if hit != exchange.cached_tokens:
        yield f"{hit} cached tokens predicted, {exchange.cached_tokens} reported"
    image_tokens = sum(span.length for span in predicted.spans)
    reported = (exchange.answer["usage"]["prompt_tokens_details"].get("multimodal_tokens") or {}).get("image", 0)
    if image_tokens != reported:
        yield f"{image_tokens} image tokens predicted, {reported} reported"
    for number, key in enumerate(predictor.keys(predicted, exchange.answer_ids)):
        if key not in order:
            yield f"block {number} predicted, never published"
        elif key not in held and order[key] != len(held):
            yield f"block {number} predicted as new block {len(held)} of the run, published as {order[key]}"
        held[key] = None
