"""The live page's view of a router: what changed, in parts of bounded size (docs/ui.md).

The page asks for nothing else until a decision is opened. Nothing here runs unless a page is open, and the event loop
gets its turn after every part.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
import orjson
from prometheus_client import Counter as MetricCounter

from mmrouter_router.api.operator_report import COUNTS, Reporter, encoder_standing
from mmrouter_router.explain.decisions import DecisionLog, DecisionTrace
from mmrouter_router.explain.round_robin import RoundRobinCaches
from mmrouter_router.fleet.holder_table import mask_of
from mmrouter_router.fleet.workers import Worker
from mmrouter_router.scheduling.placer import Placer

TICK_SECONDS = 0.5
MAP_TICKS = 4  # the map is made at every fourth tick
MAX_PAGES = 8  # open at the same time
WORKER_ROWS = 128  # per tick, in turn
DECISION_ROWS = 20  # per tick, the newest
SCORED_CANDIDATES = 512  # per tick: scores of all candidates are computed while the sum is below
SCORES = 4  # best candidates of a decision
COMPARED_KEYS = 8192  # per tick, of round robin
MAP_CONVERSATIONS, MAP_BLOCKS, MAP_WORKERS = 24, 32, 16
MAX_STATUS = 2 << 20  # bytes of what the operator sends: 64 conditions with 4,000 characters are less
MAX_STEPS = 32


class Condition(msgspec.Struct, rename="camel"):
    """One condition of the resource (metav1.Condition)."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""


class Replicas(msgspec.Struct):
    """Replicas of a pool, or of the frontend, which has no name and no gates."""

    name: str = ""
    desired: int = 0
    updated: int = 0
    ready: int = 0
    verified: int | None = None


class RolloutStep(msgspec.Struct):
    """One change that the operator makes now, or that has to wait."""

    action: str
    kind: str
    name: str
    why: str


class ResourceStatus(msgspec.Struct):
    """What the operator sends of the resource: its status, and the steps of its plan. Other fields are ignored."""

    phase: str = ""
    frontend: Replicas | None = None
    pools: tuple[Replicas, ...] = ()
    conditions: tuple[Condition, ...] = ()
    steps: tuple[RolloutStep, ...] = ()


@dataclass(slots=True)
class Cursor:
    """What one page has: the number of decisions that were made until then, and the next row of workers."""

    decisions: int = 0
    worker: int = 0
    tick: int = 0
    last: dict[str, bytes] = field(default_factory=dict)


class LiveView:
    """Makes the parts of one router for all its pages.

    ``about``: names of the deployment that do not change. ``frontends``: how many there are, this one included.
    ``exactness``: the counter of decisions by exactness and cause.
    """

    def __init__(
        self,
        reporter: Reporter,
        placer: Placer,
        decisions: DecisionLog,
        exactness: MetricCounter,
        about: dict[str, str],
        frontends: Callable[[], int],
    ) -> None:
        self.fleet, self._reporter, self._placer, self._log = reporter.fleet, reporter, placer, decisions
        self._exactness, self._about, self._frontends = exactness, about, frontends
        self._caches = RoundRobinCaches()
        self._compared = 0  # decisions that were sent to the caches of round robin, of ``decisions.added``
        self._counted_from: int | None = None  # the decisions before only fill these caches
        self.pages = 0  # whose streams are open
        self._tally: tuple[int, dict[str, list[int]]] = (-1, {})
        self._rollout: dict[str, Any] = {"received": None}

    @property
    def full(self) -> bool:
        return self.pages >= MAX_PAGES

    async def events(self, stopping: asyncio.Event, seconds: float = TICK_SECONDS) -> AsyncIterator[bytes]:
        """Yield the parts that changed as server-sent events, until ``stopping`` is set."""
        cursor = Cursor()
        self.pages += 1
        try:
            while not stopping.is_set():
                for part in self.parts(cursor):
                    if part:
                        yield part
                    await asyncio.sleep(0)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await stopping.wait()
        finally:
            self.pages -= 1

    def parts(self, cursor: Cursor) -> Iterator[bytes]:
        """Yield one tick's parts; empty where the page has it already."""
        self.compare()
        sections = [
            self.summary,
            self.rollout,
            self.workers,
            self.decisions,
            *([self.map] if cursor.tick % MAP_TICKS == 0 else ()),
        ]
        cursor.tick += 1
        for make in sections:
            name = make.__name__
            raw = orjson.dumps({name: make(cursor)})
            yield b"" if cursor.last.get(name) == raw else b"data: " + raw + b"\n\n"
            cursor.last[name] = raw

    def summary(self, _: Cursor) -> dict[str, Any]:
        """Return counts since the start, and of the decisions that are kept how they compare with round robin."""
        standings = Counter(map(self._standing, self.fleet))
        exactness = [
            (sample.labels["exactness"], sample.labels["reason"], int(sample.value))
            for metric in self._exactness.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        ]
        compared = blocks = hits = round_robin = 0
        for trace in self._kept():
            if trace.round_robin is not None:
                winner = trace.decision.choice.winner
                compared += 1
                blocks += winner.blocks
                hits += winner.overlap
                round_robin += trace.round_robin
        return {
            **self._about,
            "at": round(time.time()),
            "frontend": self._reporter.router_id,
            "frontends": self._frontends(),
            "ready": self._reporter.ready(),
            "possible": self._reporter.possible(),
            "degraded": self._reporter.degraded(),
            "index_keys": len(self.fleet.index),
            "standings": standings,
            "counts": {name: self._reporter.counts[name] for name in COUNTS},
            "exactness": exactness,
            "kept": len(self._log),
            "round_robin": {"decisions": compared, "blocks": blocks, "hits": hits, "found": round_robin},
        }

    def take_status(self, raw: bytes) -> None:
        """Take what the operator sends of the resource. Raises ``ValueError`` that names the field."""
        status = msgspec.json.decode(raw, type=ResourceStatus)
        status.steps = status.steps[:MAX_STEPS]
        self._rollout = {"received": round(time.time()), **msgspec.to_builtins(status)}

    def rollout(self, _: Cursor) -> dict[str, Any]:
        """Return the resource's conditions and rollout; ``received`` is ``None`` where no operator sends them."""
        return self._rollout

    def workers(self, cursor: Cursor) -> dict[str, Any]:
        """Return the next rows of workers, of all in turn."""
        total = len(self.fleet.workers)
        first = cursor.worker if cursor.worker < total else 0
        cursor.worker = first + WORKER_ROWS
        tally = self._by_worker()
        rows = [self._row(worker, tally) for worker in islice(self.fleet, first, first + WORKER_ROWS)]
        return {"total": total, "first": first, "rows": rows}

    def _row(self, worker: Worker, tally: dict[str, list[int]]) -> dict[str, Any]:
        member, usages = worker.member, worker.usage.values()
        standing, state = self._standing(worker), self._reporter.standing(worker)
        decisions, blocks, hits = tally.get(member.uid, (0, 0, 0))
        return {
            **{name: getattr(member, name) for name in ("uid", "name", "pool", "role")},
            "standing": standing,
            "why": "" if standing == "verified" else state.message or state.cause,
            "in_flight": sum(usage.requests + usage.peer_requests for usage in usages),
            "waiting": round(sum(usage.others for usage in usages)),
            "queue": round(sum(usage.prefill + usage.peer_prefill for usage in usages)),
            "kv_usage": max((round(usage.kv_usage, 3) for usage in usages), default=0.0),
            "held": sum(self.fleet.index.held(slot) for slot in worker.slots.values()),
            "decisions": decisions,
            "blocks": blocks,
            "hits": hits,
        }

    def _standing(self, worker: Worker) -> str:
        if worker.draining:
            return "draining"
        if worker.member.role == "encoder":
            return encoder_standing(self._reporter.standing(worker))
        return self._placer.eligibility(worker)

    def decisions(self, cursor: Cursor) -> dict[str, Any]:
        """Return the decisions since the last tick, the newest first, and how many more there were."""
        new = self._log.added - cursor.decisions
        cursor.decisions = self._log.added
        rows, scored = [], 0
        for trace in self._log.latest(min(new, DECISION_ROWS)):
            scored += len(trace.decision.choice.candidates)
            rows.append(decision_row(trace, scores=scored <= SCORED_CANDIDATES))
        return {"rows": rows, "left_out": max(0, min(new, len(self._log)) - len(rows))}

    def map(self, _: Cursor) -> dict[str, Any]:
        """Return which share of the newest conversations' blocks each of some workers holds."""
        conversations: dict[int, tuple[DecisionTrace, int]] = {}
        for trace in self._kept():
            fingerprint = trace.decision.choice.fingerprint
            newest, turns = conversations.get(fingerprint, (trace, 0))
            if turns or (trace.keys and len(conversations) < MAP_CONVERSATIONS):
                conversations[fingerprint] = newest, turns + 1
        shown = self._columns()
        masks = [mask_of(worker.slots.values()) for worker in shown]
        rows = []
        for fingerprint, (trace, turns) in conversations.items():
            keys = trace.keys[:: -(-len(trace.keys) // MAP_BLOCKS)]
            holders = [self.fleet.index.holders(key) for key in keys]
            held = [sum(bool(have & mask) for have in holders) for mask in masks]
            rows.append(
                {
                    "conversation": f"{fingerprint:016x}",
                    "request_id": trace.request_id,
                    "requests": turns,
                    "blocks": len(trace.keys),
                    "images": len(trace.images),
                    "held": [round(count / len(keys), 3) for count in held],
                    "anywhere": round(sum(have != 0 for have in holders) / len(keys), 3),
                }
            )
        return {"workers": [worker.member.name for worker in shown], "of": len(self.fleet.workers), "rows": rows}

    def _columns(self) -> list[Worker]:
        """Return the workers that were chosen most among the kept decisions, and others up to the limit, by name."""
        chosen = sorted(self._by_worker().items(), key=lambda item: -item[1][0])
        uids = dict.fromkeys(uid for uid, _ in chosen if uid in self.fleet.workers)
        uids |= dict.fromkeys(islice(self.fleet.workers, MAP_WORKERS))
        picked = [self.fleet.workers[uid] for uid in islice(uids, MAP_WORKERS)]
        return sorted(picked, key=lambda worker: worker.member.name)

    def _kept(self) -> list[DecisionTrace]:
        return self._log.latest(len(self._log))

    def _by_worker(self) -> dict[str, list[int]]:
        """Return worker uid -> decisions, blocks and hits of the kept decisions."""
        if self._tally[0] != self._log.added:
            tally: dict[str, list[int]] = {}
            for trace in self._kept():
                winner = trace.decision.choice.winner
                row = tally.setdefault(trace.decision.target.worker.member.uid, [0, 0, 0])
                predicted = trace.unpredicted is None
                row[0] += 1
                row[1] += winner.blocks * predicted
                row[2] += winner.overlap * predicted
            self._tally = self._log.added, tally
        return self._tally[1]

    def compare(self) -> None:
        """Send the prompts of new decisions to the caches of round robin, up to the limit of a tick.

        Of a log that is full, the first half only fills these caches, because those of the engines were filled before.
        """
        new, budget = min(self._log.added - self._compared, len(self._log)), COMPARED_KEYS
        if self._counted_from is None:
            full = self._log.added > len(self._log)
            self._counted_from = self._log.added - len(self._log) // 2 if full else 0
        number = self._log.added - new
        for trace in reversed(self._log.latest(new)):
            if budget <= 0:
                break
            number += 1
            if trace.unpredicted is None and trace.keys and not trace.other_keys:
                blocks = self._caches.serve(trace.keys, len(trace.decision.choice.candidates))
                trace.round_robin = blocks if number > self._counted_from else None
                budget -= len(trace.keys)
        self._compared = number


def decision_row(trace: DecisionTrace, *, scores: bool) -> dict[str, Any]:
    """Return one decision for the list, with the reason and the best candidates' costs where ``scores``."""
    decision = trace.decision
    choice, winner = decision.choice, decision.choice.winner
    best = [
        {"worker": score.candidate.name, "overlap": score.candidate.overlap, "cost": round(score.cost, 2)}
        for score in (choice.scores[:SCORES] if scores else ())
    ]
    return {
        "request_id": trace.request_id,
        "at": decision.at,
        "worker": winner.name,
        "exactness": decision.exactness,
        "reasons": decision.reasons,
        "policy": decision.policy,
        "predicted": trace.unpredicted is None,
        "tokens": trace.prompt_tokens,
        "images": len(trace.images),
        "blocks": winner.blocks,
        "overlap": winner.overlap,
        "round_robin": trace.round_robin,
        "regret": choice.regret,
        "candidates": len(choice.candidates),
        "why": choice.reason if scores else "",
        "scores": best,
    }
