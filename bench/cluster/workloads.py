"""Requests for a cluster: parts of real traces, and requests drawn from statistics of a real service.

Mooncake's traces name each prompt's blocks of 512 tokens (equal id = equal prefix); they are read from a folder and not
part of this repository. The other requests are drawn from ``bench/encoders/servegen_images.json``:
a client's instructions, images and texts, in sessions that return to earlier images.
"""

import math
import random
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench.cluster.virtual_engine import Machine
from bench.encoders.image_requests import load_clients
from bench.placing.workload import tokens
from mmrouter_cli.bench.traces import BLOCK as TRACE_BLOCK
from mmrouter_cli.bench.traces import INSTRUCTIONS, Client, read
from mmrouter_lib.block_keys import Span, block_keys, pack_keys
from mmrouter_sim.core.requests import Media

COMMON: Final = 0.01
"""A block with which more than this share of a trace's requests begin belongs to the service, not to a conversation."""
ENGINE_BLOCK: Final = 16
SEED: Final = 0x6D6D
TURNS: Final = 3.0
"""Mean turns of a session."""
THINKING: Final = 15.0
"""Mean seconds between an answer's turn and the next one."""
CATALOGUE: Final = 40
"""Images that a client shows repeatedly, the n-th in proportion to 1/n."""


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """One request. ``keys`` are the router's, ``names`` the engine's, one per complete block."""

    at: float  # seconds
    tokens: int
    output: int
    keys: "array[int]"
    names: tuple[bytes, ...]
    text_keys: "array[int]"  # without its images
    session: int  # equal for requests of one conversation
    spans: tuple[Span, ...] = ()
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Requests in order, and what is known of them without a router."""

    name: str
    block_size: int
    requests: tuple[ClusterRequest, ...]
    counted_from: float  # seconds; caches fill before
    reusable: float  # hits of one cache as large as all engines' together, as a share of the counted prompt tokens
    alone: tuple[float, ...]  # seconds of each counted prompt on an idle engine with those hits


def mooncake(folder: Path, name: str, engines: int, share: float, window: float, machine: Machine) -> ClusterLoad:
    """Return a part of one of Mooncake's traces (``conversation`` or ``synthetic``) at a load of ``share``. The trace
    is the work of two engines; for more of them other parts are added, as other users of the same service. Then time is
    stretched until the load is exact.
    """
    lines = read(folder / f"{name}_trace.jsonl").lines
    end = lines[-1].timestamp / 1000
    window = min(window, end)
    seen = Counter(each for line in lines for each in line.hash_ids)
    common = {each for each, count in seen.items() if count > COMMON * len(lines)}
    copies = max(1, engines // 2)
    requests: list[ClusterRequest] = []
    for copy in range(copies):
        start, shift = copy / copies * (end - window), (copy + 1) << 32
        for line in lines:
            at, length, ids = line.timestamp / 1000 - start, line.input_length, line.hash_ids
            if 0 <= at < window:
                keys = array("Q", [each if each in common else shift + each for each in ids[: length // TRACE_BLOCK]])
                session = shift + next((each for each in ids if each not in common), ids[0])
                names = tuple(key.to_bytes(8, "little") for key in keys)
                requests.append(ClusterRequest(at, length, line.output_length, keys, names, keys, session))
    requests.sort(key=lambda request: request.at)
    return _stretched(f"mooncake {name}", TRACE_BLOCK, requests, engines, share, machine, 0.25)


def servegen(repeats: bool, engines: int, share: float, seconds: float, machine: Machine, seed: int = 7) -> ClusterLoad:
    """Return requests with images for about so many seconds at a load of ``share``. ``repeats``: sessions of several
    turns, and images that a client repeats; without it every request stands alone and every image is new, so only
    instructions are shared.
    """
    rnd = random.Random(seed)
    clients = load_clients()
    shares = [client.share for client in clients]
    starts = [tokens(rnd, max(1, int(min(client.texts) * INSTRUCTIONS))) for client in clients]
    makers = [_Images(rnd, number, client, repeats) for number, client in enumerate(clients)]
    requests: list[ClusterRequest] = []
    session = 0
    turns = TURNS if repeats else 1.0
    # Draw sessions until their work fills the time.
    work, room, seen = 0.0, engines * share * seconds, _Shared(ENGINE_BLOCK, engines, machine)
    rough = []
    while work < room:
        which = rnd.choices(range(len(clients)), shares)[0]
        session += 1
        drawn = list(_session(rnd, clients[which], starts[which], makers[which], session, turns))
        work += sum(seen.work(request) for request in drawn)
        rough.append(drawn)
    for drawn in rough:
        began = rnd.random() * seconds
        requests += [replace(request, at=request.at + began) for request in drawn if request.at + began < seconds]
    requests.sort(key=lambda request: request.at)
    name = "servegen sessions" if repeats else "servegen lone images"
    return _stretched(name, ENGINE_BLOCK, requests, engines, share, machine, 0.4)


class _Images:
    def __init__(self, rnd: random.Random, number: int, client: Client, repeats: bool) -> None:
        self._rnd, self._number, self._client, self._repeats = rnd, number, client, repeats
        self._made = 0
        self._kept = [self._new() for _ in range(CATALOGUE)] if repeats else []
        self._weights = [1 / (rank + 1) for rank in range(CATALOGUE)]

    def draw(self) -> tuple[bytes, int]:
        if self._repeats and self._rnd.random() < 0.5:
            return self._rnd.choices(self._kept, self._weights)[0]
        return self._new()

    def _new(self) -> tuple[bytes, int]:
        self._made += 1
        name = (self._number << 40 | self._made).to_bytes(32, "big")
        return name, self._rnd.choice(self._client.tokens)


def _session(
    rnd: random.Random, client: Client, start: "array[int]", images: _Images, session: int, turns: float
) -> Iterator[ClusterRequest]:
    """Yield the turns of one session, with times since its first one. Images come with the first turn."""
    ids, text, at = start[:], start[:], 0.0
    spans: list[Span] = []
    (count,) = rnd.choices(range(len(client.counts)), client.counts)
    for _ in range(count):
        name, length = images.draw()
        spans.append(Span(len(ids), length, name))
        ids.extend([0] * length)
    more = True
    while more:
        fresh = tokens(rnd, max(1, rnd.choice(client.texts) - len(start)))
        ids, text = ids + fresh, text + fresh
        output = max(1, rnd.choice(client.outputs))
        keys = block_keys(ids, ENGINE_BLOCK, spans, SEED)
        text_keys = block_keys(text, ENGINE_BLOCK, (), SEED)
        packed = pack_keys(keys)
        names = tuple(packed[place : place + 8] for place in range(0, len(packed), 8))
        media = tuple(Media(span.identity.hex(), span.offset, span.length) for span in spans)
        yield ClusterRequest(at, len(ids), output, keys, names, text_keys, session, tuple(spans), media)
        answer = tokens(rnd, output)
        ids, text = ids + answer, text + answer
        at += rnd.expovariate(1 / THINKING)
        more = rnd.random() >= 1 / turns


class _Shared:
    """One LRU cache as large as all engines' together: an upper bound of what any routing can reuse."""

    def __init__(self, block_size: int, engines: int, machine: Machine) -> None:
        self._size, self._machine = block_size, machine
        self._room = engines * machine.kv_tokens // block_size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit(self, request: ClusterRequest) -> int:
        blocks, hits = self._blocks, 0
        for key in request.keys[: (request.tokens - 1) // self._size]:
            if key not in blocks:
                break
            hits += 1
        for key in reversed(request.keys):
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self._room:
            blocks.popitem(last=False)
        return hits * self._size

    def work(self, request: ClusterRequest) -> float:
        """Return the engine seconds of a request: computing what is not cached, beside decoding."""
        hit, machine = self.hit(request), self._machine
        visual = sum(m.length for m in request.media if m.end > hit)
        per_token = 1 / machine.prefill_rate + machine.decode_seconds / machine.max_batched_tokens
        return (request.tokens - hit) * per_token + visual * machine.encode_seconds


def _stretched(
    name: str,
    block_size: int,
    requests: Sequence[ClusterRequest],
    engines: int,
    share: float,
    machine: Machine,
    warm: float,
) -> ClusterLoad:
    """Return the load with its time stretched so that the work takes ``share`` of all engines' capacity."""
    seen = _Shared(block_size, engines, machine)
    work = sum(seen.work(request) for request in requests)
    factor = work / (engines * share) / requests[-1].at
    moved = tuple(replace(request, at=request.at * factor) for request in requests)
    begin = warm * moved[-1].at
    seen, hits, all_tokens = _Shared(block_size, engines, machine), 0, 0
    alone = []
    for request in moved:
        hit = seen.hit(request)
        if request.at >= begin:
            hits, all_tokens = hits + hit, all_tokens + request.tokens
            visual = sum(m.length for m in request.media if m.end > hit)
            alone.append((request.tokens - hit) / machine.prefill_rate + visual * machine.encode_seconds)
    if not math.isfinite(factor) or not all_tokens:
        raise ValueError(f"{name}: nothing to count")
    return ClusterLoad(name, block_size, moved, begin, hits / all_tokens, tuple(alone))
