"""Synthetic caches and prompts: blocks that workers hold, as engine events and feed keys, and prompts to place.

A conversation is a system prompt (one of a few, shared), an image (Zipf: a few are frequent) and turns of its own.
Images are runs of token ids here, because every system names images in its own way and all must give the same answers.
A worker holds prefixes of conversations, each block once. Equal seeds give equal workloads on every machine.
"""

import io
import itertools
import random
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
from PIL import Image

from mmrouter_lib import feed
from mmrouter_lib.api import MMRouterDeployment, parse_deployment
from mmrouter_lib.block_keys import block_keys
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.intake import Limits, parse_chat
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.placer import Placer
from mmrouter_router.telemetry.metrics import Metrics

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
        return sum(len(event.keys) for event in self.events)


def build(*, workers: int, blocks_per_worker: int, queries: int, seed: int = 1) -> BlockWorkload:
    """Return a workload. The workers' events are interleaved, each worker's own in order. Raises ``ValueError`` for
    more blocks than the conversations of one seed hold.
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
    known = rnd.randint(2 * PART_TOKENS, PROMPT_TOKENS)
    return rnd.choice(talks)[:known] + tokens(rnd, PROMPT_TOKENS - known)


EPOCH = 1
MOST_REPLICAS = 1000
"""Of a pool. The placer does not read them: larger fleets have several pools."""
REQUEST = parse_chat(b'{"model": "bench", "messages": [{"role": "user", "content": "in the ids"}]}', Limits(), "bench")


def deployment(*, replicas: int) -> MMRouterDeployment:
    return parse_deployment(resource(replicas=replicas))


def resource(*, replicas: int, policy: str = "kv", mode: str = "frontend", collector: str = "") -> dict[str, object]:
    """``collector``: base URL for spans; empty for none."""
    return {
        "apiVersion": "mmrouter.io/v1alpha1",
        "kind": "MMRouterDeployment",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"id": "bench/model"},
            "engine": {"type": "vllm", "blockSize": BLOCK_SIZE},
            "frontend": {"mode": mode},
            "routing": {"policy": policy},
            "observability": {"otlpEndpoint": collector},
            "pools": [{"name": "worker", "role": "worker", "replicas": replicas, "accelerator": {"kind": "cpu"}}],
        },
    }


def heartbeat(uid: str, seq: int, *, block_size: int = BLOCK_SIZE) -> feed.Heartbeat:
    """Return the heartbeat of a worker whose engine is up and whose canary passed."""
    return feed.Heartbeat(
        worker=f"{uid}/boot",
        epoch=EPOCH,
        seq=seq,
        engine="vllm",
        engine_state="up",
        engine_version="bench",
        block_size=block_size,
        model="bench/model",
        revision="",
        digests={},
        canary=feed.CanaryReport(EPOCH, "True"),
    )


def snapshot(request: int, uid: str, keys: bytes = b"") -> feed.SnapshotPart:
    return feed.SnapshotPart(request, f"{uid}/boot", EPOCH, 0, 0, 0, "GPU", keys, True)


def delta(seq: int, packed: bytes) -> feed.Delta:
    return feed.Delta(EPOCH, seq, 0.0, 0, 0, "GPU", packed, b"")


def synced(workers: int, *, block_size: int = BLOCK_SIZE, fleet: Fleet | None = None) -> tuple[Fleet, list[Worker]]:
    """Return a fleet of synced and verified workers that hold nothing. ``fleet``: an existing one to join."""
    fleet = fleet if fleet is not None else Fleet(Metrics())
    members = []
    for number in range(workers):
        uid = f"uid-{number}"
        worker = fleet.join(Member(uid, f"worker-{number}", f"127.77.0.{number}", "worker", "worker"))
        for step in fleet.feed_connected(worker):
            fleet.on_reply(worker, snapshot(getattr(step, "id", 0), uid))
        fleet.on_published(worker, heartbeat(uid, 0, block_size=block_size))
        if not worker.routable or worker.canary != "True":
            raise RuntimeError(f"worker {number} is not routable")
        members.append(worker)
    return fleet, members


def placer(fleet: Fleet, workers: int) -> Placer:
    return Placer(deployment(replicas=min(workers, MOST_REPLICAS)), fleet)


def prepared(ids: "array[int]") -> Prepared:
    """Return a predicted prompt that is ready to be placed; its keys are not computed yet."""
    return Prepared(
        request=REQUEST,
        salt=None,
        images=(),
        ids=ids,
        spans=(),
        exactness="exact",
        reasons=(),
        seed=SEED,
        fingerprint=77,
    )


JPEG_SIDES = (1120, 896)


def padded_png(size: int) -> bytes:
    """Return a PNG of 56x56 pixels and ``size`` bytes: a chunk that decoders skip makes it so large. With few pixels,
    the cost of transport shows and not that of decoding.
    """
    file = io.BytesIO()
    Image.new("RGB", (56, 56), "#3060a0").save(file, "PNG")
    png = file.getvalue()
    head, rest = png[:33], png[33:]  # signature and IHDR
    data = random.Random(size).randbytes(max(0, size - len(png) - 12))
    kind = b"mmRo"
    chunk = len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    return head + chunk + rest


def detailed_jpeg(size: int) -> bytes:
    """Return a JPEG of at least ``size`` bytes, with as much detail as a photograph of its dimensions."""
    image = Image.merge("RGB", [Image.effect_noise(JPEG_SIDES, sigma) for sigma in (40, 50, 60)])
    for quality in range(92, 100):
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        if file.tell() >= size:
            return file.getvalue()
    raise ValueError(f"no quality makes {size} bytes of {JPEG_SIDES}")
