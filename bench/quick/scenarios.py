"""Parts of the hot paths, each with a floor: the least that an interpreter does for the same data.

Their ratio is about the same on any machine.
"""

import asyncio
import random
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pybase64
from xxhash import xxh3_64_intdigest

from bench.feed import sidecar_ingest
from bench.placing import decision_time, request_path, workload
from bench.placing.large_fleet import LargeFleet
from bench.placing.request_path import TINY, WORDS, conversation
from bench.placing.workload import BLOCK_SIZE, PROMPT_TOKENS, SEED, build, detailed_jpeg, split, vllm_payload
from mmrouter_lib import feed
from mmrouter_lib.block_keys import block_keys, pack_keys
from mmrouter_lib.image_size import probe
from mmrouter_lib.media_identity import media_identity
from mmrouter_lib.model_folder import find_json
from mmrouter_lib.prompt.segment_cache import SegmentCache
from mmrouter_lib.prompt.tokenizer import load_tokenizer
from mmrouter_router.fleet.holder_table import mask_of
from mmrouter_router.media.content import decode
from mmrouter_router.scheduling.scoring import Policy

WORKERS = 64
HELD = 500
"""Blocks per worker."""
LARGE_FLEET, LARGE_FLEET_HELD = 1000, 100
"""Workers, and blocks of each."""
TURNS = 4
LOOKUPS = "dictionary lookups"


@dataclass(frozen=True, slots=True)
class Scenario:
    """``fresh`` makes the argument of ``once`` and ``floor``, uncounted; ``units``: how much work they do."""

    name: str
    unit: str
    against: str
    once: Callable[[Any], object]
    floor: Callable[[Any], object]
    fresh: Callable[[], Any] = lambda: None
    units: int = 1


@contextmanager
def scenarios() -> Iterator[list[Scenario]]:
    """Yield all scenarios; they share what is costly to make."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with tempfile.TemporaryDirectory(prefix="mmrouter-bench-") as folder:
        ours = request_path.Ours(TINY)
        try:
            yield [
                *placement_scenarios(),
                *large_fleet_scenarios(),
                *ingest_scenarios(Path(folder)),
                tokenization_scenario(),
                image_scenario(),
                request_scenario(ours, loop),
            ]
        finally:
            loop.run_until_complete(ours.close())
            loop.close()
            asyncio.set_event_loop(None)


def placement_scenarios() -> list[Scenario]:
    load = build(workers=WORKERS, blocks_per_worker=HELD, queries=1)
    ours = decision_time.Ours(load)
    ids = load.queries[0]
    data = ids.tobytes()
    table = {key: event.worker for event in load.events for key in event.keys}
    keys = block_keys(ids, BLOCK_SIZE, (), SEED)
    width = 4 * BLOCK_SIZE

    def digests(_: object) -> list[int]:
        return [xxh3_64_intdigest(data[at : at + width]) for at in range(0, len(data), width)]

    def lookups(_: object) -> list[int | None]:
        return [table.get(key) for key in keys]

    wanted = mask_of(ours.slots)
    return [
        Scenario(
            "block keys",
            "8k tokens",
            "a loop of xxh3",
            once=lambda _: block_keys(ids, BLOCK_SIZE, (), SEED),
            floor=digests,
        ),
        Scenario("index", "prompt", LOOKUPS, once=lambda _: ours.index.leading(keys, wanted), floor=lookups),
        Scenario(
            "keys, index and placement, 64 workers", "prompt", LOOKUPS, once=lambda _: ours.place(ids), floor=lookups
        ),
    ]


def large_fleet_scenarios() -> list[Scenario]:
    load = build(workers=LARGE_FLEET, blocks_per_worker=LARGE_FLEET_HELD, queries=1)
    fleet = LargeFleet(load)
    keys = fleet.prompts[0].keys(BLOCK_SIZE)
    table = {key: event.worker for event in load.events for key in event.keys}

    def scenario(name: str, policy: Policy, fresh: Callable[[], None] = lambda: None) -> Scenario:
        return Scenario(
            f"{name}, {LARGE_FLEET} workers",
            "prompt",
            LOOKUPS,
            once=lambda _: fleet.place(0, policy),
            floor=lambda _: [table.get(key) for key in keys],
            fresh=fresh,
        )

    return [
        scenario("placement", "kv"),
        scenario("placement after a change", "kv", fleet.change),
        scenario("placement in turns", "roundRobin"),
    ]


def ingest_scenarios(folder: Path) -> list[Scenario]:
    load = build(workers=8, blocks_per_worker=HELD, queries=0)
    result = []
    for size, events in ((64, load.events), (1, tuple(split(load.events, 1))[:1000])):
        blocks = sum(len(event.keys) for event in events)
        seqs = count(1)
        frames = [(event.worker, pack_keys(event.keys)) for event in events]
        keys = [(event.worker, event.keys) for event in events]
        payloads = [vllm_payload(event) for event in events if event.worker == 0]
        own = sum(len(event.keys) for event in events if event.worker == 0)
        result.append(
            Scenario(
                f"feed into the index, {size}-block deltas",
                "block",
                "dictionary stores",
                _apply,
                partial(_store, keys),
                partial(_feed, frames),
                blocks,
            )
        )
        result.append(
            Scenario(
                f"engine events into the feed, {size}-block events",
                "block",
                "msgpack",
                lambda relay, payloads=payloads: sidecar_ingest.relay_batches(relay, payloads),  # type: ignore[misc]
                lambda _, payloads=payloads: [msgspec.msgpack.decode(payload) for payload in payloads],  # type: ignore[misc]
                partial(_relay, folder, seqs),
                own,
            )
        )
    return result


def tokenization_scenario() -> Scenario:
    config = find_json(TINY, "tokenizer_config.json") or {}
    whole = load_tokenizer(TINY, config)
    cached = SegmentCache(load_tokenizer(TINY, config))
    history = conversation(whole)
    cached(history, add_special_tokens=False)
    numbers = count()

    def texts() -> list[str]:
        return [f"{history}<|im_start|>user\nTurn {next(numbers)}: {WORDS}<|im_end|>\n" for _ in range(TURNS)]

    def once(texts: list[str]) -> list["array[int]"]:
        return [cached(text, add_special_tokens=False) for text in texts]

    def floor(texts: list[str]) -> list[Any]:
        return [whole.encode_batch_fast([text], add_special_tokens=False) for text in texts]

    return Scenario(f"tokens, {PROMPT_TOKENS} and a new turn", "prompt", "the whole text", once, floor, texts, TURNS)


def image_scenario() -> Scenario:
    """Return base64, identity and size of an image of 1 MB."""
    data = detailed_jpeg(request_path.IMAGE_BYTES)
    uri = "data:image/jpeg;base64," + pybase64.b64encode(data).decode()
    key = bytes(32)

    def once(_: object) -> object:
        decoded = decode(uri, 1 << 26)
        return media_identity(decoded, {}, key=key), probe(decoded, max_pixels=1 << 30, exif=True)

    return Scenario("image of 1 MB", "image", "base64", once, lambda _: pybase64.b64decode(uri[23:]))


def request_scenario(ours: request_path.Ours, loop: asyncio.AbstractEventLoop) -> Scenario:
    """Return the complete request path, warm."""
    bodies = request_path.RequestBodies(ours)
    loop.run_until_complete(ours.fill(bodies.body(0)))
    naive, numbers = request_path.Naive(ours, bodies.body(0)), count(1)

    return Scenario(
        "whole routing cost, 8k tokens and an image of 1 MB",
        "request",
        "the naive way",
        lambda raw: loop.run_until_complete(ours.route(raw)),
        naive.route,
        lambda: bodies.body(next(numbers)),
    )


def _feed(frames: list[tuple[int, bytes]]) -> tuple[Any, list[tuple[int, bytes]]]:
    fleet, members = workload.synced(8)
    seqs = [0] * 8
    deltas = []
    for worker, packed in frames:
        seqs[worker] += 1
        deltas.append((worker, feed.encode(workload.delta(seqs[worker], packed))))
    return (fleet, members), deltas


def _apply(state: tuple[Any, list[tuple[int, bytes]]]) -> None:
    (fleet, members), deltas = state
    for worker, payload in deltas:
        fleet.on_published(members[worker], feed.decode_published(payload))


def _store(keys: list[tuple[int, "array[int]"]], _: object) -> dict[int, int]:
    table: dict[int, int] = {}
    for worker, some in keys:
        for key in some:
            table[key] = worker
    return table


def _relay(folder: Path, numbers: "count[int]") -> Any:
    where = folder / f"{next(numbers)}-{random.getrandbits(32):08x}"

    def publish(frame: feed.Published) -> None:
        feed.encode(frame)

    return sidecar_ingest.make_relay(where, publish)
