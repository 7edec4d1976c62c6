"""Synthetic caches and prompts: blocks that workers hold, as engine events and feed keys, and prompts to place.

A conversation is a system prompt (one of a few, shared), an image (Zipf: a few are frequent) and turns of its own.
Images are runs of token ids here, because every system names images in its own way and all must give the same answers.
A worker holds prefixes of conversations, each block once. Equal seeds give equal workloads on every machine.
"""

import itertools
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from mmrouter_lib.block_keys import block_keys

BLOCK_SIZE = 16
PROMPT_TOKENS = 8192
EVENT_BLOCKS = 64
STEP = 16
"""One-block events per batch of an engine that decodes 256 answers: each fills a block every 16 tokens."""
STEPS = f"steps of {STEP} 1-block events"
SEED, ENGINE_SEED = 0x6D6D, 0xE16E
SYSTEM_PROMPTS, IMAGES, CONVERSATIONS = 4, 64, 256
PART_TOKENS = 1024
"""Tokens of a system prompt, and of an image."""
MAX_BLOCKS = 60_000
"""Most blocks of a worker: half of what all conversations have, since few are drawn to their end."""


@dataclass(frozen=True, slots=True)
class Event:
    """Blocks that one worker stores: ``hashes`` as its engine publishes them, ``keys`` as the feed carries them."""

    worker: int
    parent: int | None  # engine hash of the block before
    hashes: "array[int]"
    ids: "array[int]"
    keys: "array[int]"


@dataclass(frozen=True, slots=True)
class BlockWorkload:
    """Stored events and prompts. ``probes``: per worker, the ids of the longest conversation that it holds."""

    workers: int
    events: tuple[Event, ...]
    queries: tuple["array[int]", ...]
    probes: tuple["array[int]", ...]

    @property
    def blocks(self) -> int:
        """Number of (block, worker) pairs stored."""
        return sum(len(event.keys) for event in self.events)


def build(*, workers: int, blocks_per_worker: int, queries: int, seed: int = 1) -> BlockWorkload:
    """Return a workload. The workers' events are interleaved, each worker's own in order.

    Raises ``ValueError`` for more blocks than the conversations of one seed hold.
    """
    if blocks_per_worker > MAX_BLOCKS:
        raise ValueError(f"one seed fills {MAX_BLOCKS} blocks per worker, not {blocks_per_worker}: take several seeds")
    rnd = random.Random(seed)
    talks = _conversations(rnd)
    keys = [block_keys(ids, BLOCK_SIZE, (), SEED) for ids in talks]
    hashes = [block_keys(ids, BLOCK_SIZE, (), ENGINE_SEED) for ids in talks]
    per_worker: list[list[Event]] = []
    probes: list[array[int]] = []
    for worker in range(workers):
        held: set[int] = set()
        events: list[Event] = []
        longest = 0
        probe: array[int] = array("I")
        while len(held) < blocks_per_worker:
            talk = rnd.randrange(CONVERSATIONS)
            room = blocks_per_worker - len(held)
            length = rnd.randint(PART_TOKENS // BLOCK_SIZE, PROMPT_TOKENS // BLOCK_SIZE)
            first = next((n for n in range(length) if hashes[talk][n] not in held), length)
            length = min(length, first + room)
            held.update(hashes[talk][first:length])
            events += _events(worker, talks[talk], hashes[talk], keys[talk], first, length)
            if length > longest:
                longest, probe = length, talks[talk][: length * BLOCK_SIZE]
        per_worker.append(events)
        probes.append(probe)
    mixed = [event for turn in itertools.zip_longest(*per_worker) for event in turn if event is not None]
    return BlockWorkload(workers, tuple(mixed), tuple(_query(rnd, talks) for _ in range(queries)), tuple(probes))


def split(events: Sequence[Event], blocks: int) -> Iterator[Event]:
    """Split events into events of at most ``blocks`` blocks, as engines publish them while they decode."""
    for event in events:
        for first in range(0, len(event.hashes), blocks):
            yield replace(
                event,
                parent=event.hashes[first - 1] if first else event.parent,
                hashes=event.hashes[first : first + blocks],
                ids=event.ids[first * BLOCK_SIZE : (first + blocks) * BLOCK_SIZE],
                keys=event.keys[first : first + blocks],
            )


def steps(events: Sequence[Event], count: int) -> Iterator[tuple[Event, ...]]:
    """Group each worker's events by ``count``, in order: one batch per step of an engine."""
    pending: dict[int, list[Event]] = {}
    for event in events:
        batch = pending.setdefault(event.worker, [])
        batch.append(event)
        if len(batch) == count:
            yield tuple(pending.pop(event.worker))
    yield from map(tuple, pending.values())


def vllm_payload(*events: Event) -> bytes:
    """Return a batch of events as vLLM 0.32 publishes it (docs/engine-facts/vllm.md#event-frames)."""
    return msgspec.msgpack.encode([1.0, [_stored(event) for event in events], 0])


def _stored(event: Event) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": list(event.hashes),
        "parent_block_hash": event.parent,
        "token_ids": list(event.ids),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(event.hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def tokens(rnd: random.Random, count: int) -> "array[int]":
    """Return random token ids below 2**17."""
    mask = int.from_bytes(b"\xff\xff\x01\x00" * count, "little")
    ids = array("I")
    ids.frombytes((int.from_bytes(rnd.randbytes(4 * count), "little") & mask).to_bytes(4 * count, "little"))
    return ids


def _conversations(rnd: random.Random) -> list["array[int]"]:
    systems = [tokens(rnd, PART_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    images = [tokens(rnd, PART_TOKENS) for _ in range(IMAGES)]
    popularity = [1 / (rank + 1) for rank in range(IMAGES)]
    return [
        rnd.choice(systems) + rnd.choices(images, popularity)[0] + tokens(rnd, PROMPT_TOKENS - 2 * PART_TOKENS)
        for _ in range(CONVERSATIONS)
    ]


def _events(
    worker: int, ids: "array[int]", hashes: "array[int]", keys: "array[int]", first: int, end: int
) -> Iterator[Event]:
    for start in range(first, end, EVENT_BLOCKS):
        stop = min(start + EVENT_BLOCKS, end)
        yield Event(
            worker,
            hashes[start - 1] if start else None,
            hashes[start:stop],
            ids[start * BLOCK_SIZE : stop * BLOCK_SIZE],
            keys[start:stop],
        )


def _query(rnd: random.Random, talks: list["array[int]"]) -> "array[int]":
    """Return a prefix of a conversation and a new turn up to the prompt's length."""
    known = rnd.randint(2 * PART_TOKENS, PROMPT_TOKENS)
    return rnd.choice(talks)[:known] + tokens(rnd, PROMPT_TOKENS - known)
