"""Microseconds per routing decision from 8k token ids, against a naive scan and Dynamo's selection service.

All place the same prompts over the same stored blocks, interleaved query by query in one run, and the overlap of their
winners must be equal in every query.
"""

import gc
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from bench.peers.dynamo_client import Dynamo, fed_dynamo
from bench.peers.peer_installation import PeerMissingError
from bench.placing import router_objects
from bench.placing.block_workload import BLOCK_SIZE, PROMPT_TOKENS, SEED, BlockWorkload, build
from bench.rows import Row, not_run, percentile, row
from mmrouter_lib.block_keys import Span, block_keys, pack_keys
from mmrouter_router.fleet.index import mask_of
from mmrouter_router.scheduling.candidate_columns import column_getter
from mmrouter_router.scheduling.scoring import CandidateTable, choose

SIZES = (64, 256)
QUERIES = 1000
SCAN_EVERY = 4
"""The full scan is timed once in so many queries: it takes longer than all others and evicts CPU caches."""
BLOCKS_PER_WORKER = 4000
IMAGE = Span(1024, 2048, bytes(32))
GOALS = {64: "<= 160"}


class AnswersDifferError(Exception):
    """Two implementations gave different answers, so their times are not comparable."""


def run() -> list[Row]:
    """Measure every size. Raises :class:`AnswersDifferError`."""
    rows = _keys()
    for workers in SIZES:
        load = build(workers=workers, blocks_per_worker=BLOCKS_PER_WORKER, queries=QUERIES)
        rows += compare(load)
    return rows


class Ours:
    """The router's pure core (keys, index, choice) and, over the same index, its placer with live workers."""

    def __init__(self, load: BlockWorkload) -> None:
        fleet, members = router_objects.synced(load.workers)
        seqs = [0] * load.workers
        for event in load.events:
            seqs[event.worker] += 1
            fleet.on_published(members[event.worker], router_objects.delta(seqs[event.worker], pack_keys(event.keys)))
        count = load.workers
        self.index = fleet.index
        self.slots = [worker.slots[0] for worker in members]
        self._asked, self._mask, self._held = (
            dict.fromkeys(self.slots, 0),
            mask_of(self.slots),
            column_getter(self.slots),
        )
        self._who = [f"{worker.id}#0" for worker in members], [w.member.name for w in members], ["worker"] * count
        self._idle, self._scored = (0.0,) * count, (True,) * count
        self._placer = router_objects.placer(fleet, count)

    def decide(self, ids: "array[int]") -> int:
        """Return the winner's overlap in blocks."""
        keys, idle = block_keys(ids, BLOCK_SIZE, (), SEED), self._idle
        found = self.index.match(keys, self._asked, self._mask)
        candidates = CandidateTable(
            *self._who,
            overlap=list(found.values()),
            blocks=(len(keys),) * len(self.slots),
            prefill=idle,
            active=idle,
            waiting=(),
            held=self.index.held_by(self._held),
            scored=self._scored,
            coming=(),
            encode=(),
        )
        return choose(candidates, policy="kv", overlap_weight=1.0, fingerprint=77, turn=0).winner.overlap

    def place(self, ids: "array[int]") -> int:
        """The same by the router's placer, with the state of its workers: standing, loads, ranks."""
        return self._placer.place(router_objects.prepared(ids)).choice.winner.overlap


class Naive:
    """One set of keys per worker, each scanned with the whole prompt."""

    def __init__(self, load: BlockWorkload) -> None:
        self.held: list[set[int]] = [set() for _ in range(load.workers)]
        for event in load.events:
            self.held[event.worker].update(event.keys)

    def decide(self, ids: "array[int]") -> int:
        """Return the winner's overlap in blocks."""
        keys = block_keys(ids, BLOCK_SIZE, (), SEED)
        best = 0
        for held in self.held:
            found = [key in held for key in keys]
            best = max(best, found.index(False) if False in found else len(keys))
        return best

    def overlap(self, ids: "array[int]") -> int:
        """Return the same overlap, but stop at a worker's first missing block."""
        keys = block_keys(ids, BLOCK_SIZE, (), SEED)
        return max(sum(1 for _ in takewhile(held.__contains__, keys)) for held in self.held)


@dataclass
class Timed:
    """Microseconds of each decision, and the winners' overlaps."""

    us: list[float] = field(default_factory=list)
    overlaps: list[int] = field(default_factory=list)

    def add(self, us: float, overlap: int) -> None:
        """Record one decision."""
        self.us.append(us)
        self.overlaps.append(overlap)

    def measure(self, decide: Callable[["array[int]"], int], ids: "array[int]") -> None:
        began = time.perf_counter_ns()
        overlap = decide(ids)
        self.add((time.perf_counter_ns() - began) / 1000, overlap)

    def at(self, share: float) -> float:
        """Return a percentile in microseconds."""
        return percentile(self.us, share)

    def __str__(self) -> str:
        return f"p50 {self.at(0.5):.4g} us, p99 {self.at(0.99):.4g} us"


def compare(load: BlockWorkload) -> list[Row]:
    """Return the rows of one workload. Raises :class:`AnswersDifferError`."""
    ours, naive = Ours(load), Naive(load)
    deciders = {"ours": ours.decide, "placement": ours.place}
    times = {name: Timed() for name in (*deciders, "naive")}
    reason = ""
    with ExitStack() as stack:
        try:
            dynamo = _start_dynamo(stack, load)
        except PeerMissingError as missing:
            dynamo, reason = None, str(missing)
        else:
            times["dynamo"] = Timed()
        # As the router does at its start: keep long-lived objects out of collections.
        gc.collect()
        gc.freeze()
        try:
            for number, ids in enumerate(load.queries):
                # The first one finds cold CPU caches, so they alternate.
                for name in sorted(deciders, reverse=number % 2 == 1):
                    times[name].measure(deciders[name], ids)
                if dynamo is not None:
                    times["dynamo"].add(*dynamo.select(number))
                if number % SCAN_EVERY == 0:
                    times["naive"].measure(naive.decide, ids)
        finally:
            gc.unfreeze()
        scanned, times["naive"].overlaps = times["naive"].overlaps, [naive.overlap(ids) for ids in load.queries]
        require_equal({"naive": times["naive"].overlaps[::SCAN_EVERY], "full scan": scanned})
        require_equal({name: timed.overlaps for name, timed in times.items()})
        peer = dynamo.name if dynamo is not None else None
    return _rows(load, times, peer, reason)


def require_equal(answers: dict[str, Sequence[int]]) -> None:
    """Raise :class:`AnswersDifferError` that names the first query on which two implementations disagree."""
    (first, expected), *others = answers.items()
    for name, found in others:
        if len(found) != len(expected):
            raise AnswersDifferError(f"{name} answered {len(found)} queries, {first} {len(expected)}")
        for number, (a, b) in enumerate(zip(expected, found, strict=True)):
            if a != b:
                raise AnswersDifferError(f"query {number}: {first} has {a} blocks of overlap, {name} {b}")


def _start_dynamo(stack: ExitStack, load: BlockWorkload) -> Dynamo:
    """Start the peer and feed it the events that the workload's engines would publish."""
    dynamo, publish = stack.enter_context(fed_dynamo(load))
    publish((event,) for event in load.events)
    dynamo.settle([len(ids) // BLOCK_SIZE for ids in load.probes])
    dynamo.load(load.queries)
    return dynamo


def _rows(load: BlockWorkload, times: dict[str, Timed], peer: str | None, reason: str) -> list[Row]:
    what = f"decision, {load.workers} workers"
    ours, naive = times["ours"], times["naive"]
    scan = f"naive full scan: {naive}"
    rows = [
        row(f"{what}: p50", ours.at(0.5), "us", goal=GOALS.get(load.workers)),
        row(f"{what}: p99", ours.at(0.99), "us"),
        row(f"{what}: through the placer, p50", times["placement"].at(0.5), "us"),
        row(f"{what}: through the placer, p99", times["placement"].at(0.99), "us"),
        row(f"{what}: below a full scan, p50", naive.at(0.5) / ours.at(0.5), "x", peer=scan),
    ]
    name = f"{what}: below Dynamo, "
    if peer is None:
        return [*rows, not_run(name + "p50", "x", reason, goal=">= 4"), not_run(name + "p99", "x", reason)]
    dynamo = times["dynamo"]
    words, count = f"{peer}: {dynamo}", len(load.queries)
    return [
        *rows,
        row(name + "p50", dynamo.at(0.5) / ours.at(0.5), "x", peer=words, goal=">= 4"),
        row(name + "p99", dynamo.at(0.99) / ours.at(0.99), "x", peer=words),
        row(name + "p50, through the placer", dynamo.at(0.5) / times["placement"].at(0.5), "x", peer=words),
        row(f"{what}: queries with the same overlap as Dynamo", count, f"of {count}", peer=peer),
    ]


def _keys(rounds: int = 400) -> list[Row]:
    """Block keys alone: text, and an image over a quarter of the prompt."""
    ids = array("I", range(PROMPT_TOKENS))
    rows = []
    for what, spans, goal in (("text", (), "<= 0.12"), ("an image over a quarter of it", (IMAGE,), None)):
        once = partial(block_keys, ids, BLOCK_SIZE, spans, SEED)
        took = []
        for _ in range(rounds):
            began = time.perf_counter_ns()
            blocks = len(once())
            took.append((time.perf_counter_ns() - began) / 1000 / blocks)
        rows.append(row(f"block keys, 8k tokens, {what}: p50 per block", percentile(took, 0.5), "us", goal=goal))
    return rows
