"""Microseconds per routing decision from 8k token ids, against Dynamo's selection service. The overlap of the winners
must be that of a naive scan in every query (docs/performance.md, *decision*).
"""

import gc
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import takewhile

from bench.peer_routers import Dynamo, PeerMissingError, fed_dynamo
from bench.placing import workload
from bench.placing.workload import BLOCK_SIZE, SEED, BlockWorkload, build
from bench.report import AnswersDifferError, Row, not_run, percentile, row
from mmrouter_lib.block_keys import block_keys, pack_keys
from mmrouter_router.fleet.holder_table import mask_of
from mmrouter_router.scheduling.candidate_columns import column_getter
from mmrouter_router.scheduling.scoring import CandidateTable, choose

SIZES = (64, 256)
QUERIES = 1000
BLOCKS_PER_WORKER = 4000
GOALS = {64: "<= 160"}


def run() -> list[Row]:
    """Measure every size. Raises :class:`AnswersDifferError`."""
    rows: list[Row] = []
    for workers in SIZES:
        load = build(workers=workers, blocks_per_worker=BLOCKS_PER_WORKER, queries=QUERIES)
        rows += compare(load)
    return rows


class Ours:
    """The router's pure core (keys, index, choice) and, over the same index, its placer with live workers."""

    def __init__(self, load: BlockWorkload) -> None:
        fleet, members = workload.synced(load.workers)
        seqs = [0] * load.workers
        for event in load.events:
            seqs[event.worker] += 1
            fleet.on_published(members[event.worker], workload.delta(seqs[event.worker], pack_keys(event.keys)))
        count = load.workers
        self.fleet, self.index = fleet, fleet.index
        self.slots = [worker.slots[0] for worker in members]
        self._mask, self._held = mask_of(self.slots), column_getter(self.slots)
        self._who = [f"{worker.id}#0" for worker in members], [w.member.name for w in members], ["worker"] * count
        self._idle, self._scored = (0.0,) * count, (True,) * count
        self.placer = workload.placer(fleet, count)

    def decide(self, ids: "array[int]") -> int:
        keys, idle = block_keys(ids, BLOCK_SIZE, (), SEED), self._idle
        overlaps = self.index.leading(keys, self._mask)
        candidates = CandidateTable(
            *self._who,
            overlap=self._held(overlaps),
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
        return self.placer.place(workload.prepared(ids)).choice.winner.overlap


def scan(load: BlockWorkload) -> list[int]:
    """Return the best overlap of each query, by a scan of one set of keys per worker."""
    held_by: list[set[int]] = [set() for _ in range(load.workers)]
    for event in load.events:
        held_by[event.worker].update(event.keys)
    queries = [block_keys(ids, BLOCK_SIZE, (), SEED) for ids in load.queries]
    return [max(sum(1 for _ in takewhile(held.__contains__, keys)) for held in held_by) for keys in queries]


@dataclass
class Timed:
    """Microseconds of each decision, and the winners' overlaps."""

    us: list[float] = field(default_factory=list)
    overlaps: list[int] = field(default_factory=list)

    def add(self, us: float, overlap: int) -> None:
        self.us.append(us)
        self.overlaps.append(overlap)

    def at(self, share: float) -> float:
        """Return a percentile in microseconds."""
        return percentile(self.us, share)

    def __str__(self) -> str:
        return f"p50 {self.at(0.5):.4g} us, p99 {self.at(0.99):.4g} us"


def compare(load: BlockWorkload) -> list[Row]:
    """Return the rows of one workload. Raises :class:`AnswersDifferError`."""
    ours = Ours(load)
    deciders = {"ours": ours.decide, "placement": ours.place}
    times = {name: Timed() for name in deciders}
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
                    began = time.perf_counter_ns()
                    overlap = deciders[name](ids)
                    times[name].add((time.perf_counter_ns() - began) / 1000, overlap)
                if dynamo is not None:
                    answer = dynamo.call("select", number=number)
                    times["dynamo"].add(answer["us"], answer["overlap"])
        finally:
            gc.unfreeze()
        require_equal({**{name: timed.overlaps for name, timed in times.items()}, "naive": scan(load)})
        peer = dynamo.name if dynamo is not None else None
    return _rows(load, times, peer, reason)


def require_equal(answers: dict[str, Sequence[int]]) -> None:
    """Raise :class:`AnswersDifferError` that names the first query on which two implementations disagree."""
    (first, expected), *others = answers.items()
    for name, overlaps in others:
        if len(overlaps) != len(expected):
            raise AnswersDifferError(f"{name} answered {len(overlaps)} queries, {first} {len(expected)}")
        for number, (a, b) in enumerate(zip(expected, overlaps, strict=True)):
            if a != b:
                raise AnswersDifferError(f"query {number}: {first} has {a} blocks of overlap, {name} {b}")


def _start_dynamo(stack: ExitStack, load: BlockWorkload) -> Dynamo:
    dynamo = stack.enter_context(fed_dynamo(load))
    dynamo.publish((event,) for event in load.events)
    dynamo.settle()
    dynamo.load(load.queries)
    return dynamo


def _rows(load: BlockWorkload, times: dict[str, Timed], peer: str | None, reason: str) -> list[Row]:
    what = f"decision, {load.workers} workers"
    ours = times["ours"]
    rows = [
        row(f"{what}: p50", ours.at(0.5), "us", goal=GOALS.get(load.workers)),
        row(f"{what}: p99", ours.at(0.99), "us"),
        row(f"{what}: through the placer, p50", times["placement"].at(0.5), "us"),
        row(f"{what}: through the placer, p99", times["placement"].at(0.99), "us"),
    ]
    name = f"{what}: below Dynamo, "
    if peer is None:
        return [*rows, not_run(name + "p50", "x", reason, goal=">= 4"), not_run(name + "p99", "x", reason)]
    dynamo = times["dynamo"]
    words = f"{peer}: {dynamo}"
    return [
        *rows,
        row(name + "p50", dynamo.at(0.5) / ours.at(0.5), "x", peer=words, goal=">= 4"),
        row(name + "p99", dynamo.at(0.99) / ours.at(0.99), "x", peer=words),
        row(name + "p50, through the placer", dynamo.at(0.5) / times["placement"].at(0.5), "x", peer=words),
    ]
