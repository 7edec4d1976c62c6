"""Reports to the operator: whether each pod is routable and verified (docs/architecture.md), and monotonic counts.

A report holds no clock, sequence number or load, so two reports are equal unless something relevant changed. The
stream sends whole reports as server-sent events, only after changes. They are compared after every change of the fleet
and twice a second, because some states change with time alone (a silent sidecar, a probe). Changes of counts alone are
sent at most every :data:`COUNTS_SECONDS`, so a busy router sends a bounded number of events.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from mmrouter_router.encoding.encoder_pods import EncoderProbes, ProbeState
from mmrouter_router.fleet.feed_session import STALE_SECONDS
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.request.renderer_client import ROLE as RENDERER_ROLE
from mmrouter_router.request.renderer_client import Renderer
from mmrouter_router.scheduling.disaggregation import canary_applies

BATCH_SECONDS = 0.2  # changes within this time are one event
CHECK_SECONDS = 0.5
COUNTS_SECONDS = 5.0
KEEPALIVE_SECONDS = 15.0  # interval of comments, by which the operator tells a quiet router from a dead one
COUNTS = ("decisions", "exact_decisions", "prompt_blocks", "hit_blocks")
KEEPALIVE = b": still here\n\n"
UNROUTABLE = ("not_heard", "draining", "engine_starting", "engine_down", "no_snapshot")
"""Causes for which an engine with a feed gets no requests."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """Makes the reports of one router.

    ``possible``: whether prompts of this model can be predicted; ``possible_at``: those that a worker's engine makes.
    ``degraded``: the stages that are skipped because no pod can serve them.
    """

    router_id: str
    engine: str
    fleet: Fleet
    renderer: Renderer
    probes: EncoderProbes
    counts: Counter[str]  # named as in COUNTS, since the process started
    ready: Callable[[], bool]
    possible: Callable[[], bool]
    possible_at: Callable[[Worker], bool]
    degraded: Callable[[], tuple[str, ...]]

    def report(self) -> dict[str, Any]:
        workers: dict[str, dict[str, Any]] = {}
        for worker in self.fleet:
            member = worker.member
            draining = member.draining or (worker.heartbeat is not None and worker.heartbeat.draining)
            row = _row(member.uid, member.pool, member.role, self.standing(worker), draining=draining)
            shared = worker.heartbeat.shared if worker.heartbeat is not None else None
            if shared is not None:  # without its fill level, which changes with every request
                row["shared"] = {"above": shared.above, "limit": shared.limit}
            if worker.heartbeat is not None and worker.heartbeat.device:
                row["device"] = {"actual": worker.heartbeat.device, "requested": worker.heartbeat.requested_device}
            workers[member.uid] = row
        for row in self.renderer.state():
            standing = _renderer_state(row)
            workers[row["uid"]] = _row(row["uid"], row["pool"], RENDERER_ROLE, standing, draining=row["draining"])
        return {
            "router": self.router_id,
            "ready": self.ready(),
            "workers": workers,
            "degraded": list(self.degraded()),
            **{name: self.counts[name] for name in COUNTS},
        }

    def standing(self, worker: Worker) -> ProbeState:
        """Return the state of a pod with a sidecar, by its role."""
        if worker.member.role == "encoder":
            return self.probes.encoder(worker)
        if unroutable := self._unroutable(worker):
            return ProbeState(False, worker.canary, *unroutable)
        return ProbeState(True, worker.canary, *self._unverified(worker))

    def _unroutable(self, worker: Worker) -> tuple[str, str] | tuple[()]:
        """Return why the worker is unroutable, as cause and message; empty where it is routable."""
        beat = worker.heartbeat
        if beat is None or self.fleet.now() - worker.heartbeat_at > STALE_SECONDS:
            return "not_heard", "its sidecar is not heard"
        if beat.draining or worker.member.draining:
            return "draining", "it lets its last requests finish"
        if beat.engine_state != "up":
            return f"engine_{beat.engine_state}", f"its engine is {beat.engine_state}"
        return () if worker.sync.synced else ("no_snapshot", "the snapshot of its cache has not come yet")

    def _unverified(self, worker: Worker) -> tuple[str, str]:
        canary = worker.heartbeat.canary if worker.heartbeat is not None else None
        if worker.canary != "Unknown" and canary is not None:
            return canary.cause, canary.message
        if not canary_applies(worker.member.role):
            return "not_probed", f"no canary is defined for a {worker.member.role} of {self.engine}"
        if not self.possible_at(worker):
            return "not_modelled", "prompts cannot be predicted for this model and engine: they go by affinity"
        return "pending", "its canary has not been answered yet"


def _renderer_state(row: dict[str, Any]) -> ProbeState:
    if not row["answered"]:
        return ProbeState(False, "Unknown", "not_answered", row["message"] or "it has not answered yet")
    if row["verified"]:
        return ProbeState(True, "True")
    if row["message"]:
        return ProbeState(True, "False", "rendering", row["message"])
    return ProbeState(True, "Unknown", "pending", "no image has been rendered yet")


def encoder_standing(state: ProbeState) -> str:
    """Return the standing of an encoder: it has no canary and no blocks."""
    proved = {"True": "verified", "False": "degraded"}.get(state.verified, "pending")
    return proved if state.routable else "unsynced"


def _row(uid: str, pool: str, role: str, standing: ProbeState, *, draining: bool) -> dict[str, Any]:
    return {"uid": uid, "pool": pool, "role": role, **standing._asdict(), "draining": draining}


async def events(
    report: Callable[[], dict[str, Any]],
    fleet: Fleet,
    stopping: asyncio.Event,
    *,
    counts_seconds: float = COUNTS_SECONDS,
    keepalive_seconds: float = KEEPALIVE_SECONDS,
) -> AsyncIterator[bytes]:
    """Yield the report now and after changes, with comments in between; end after ``stopping`` is set."""
    changed = asyncio.Event()
    fleet.change_listeners.append(changed.set)
    last: dict[str, Any] = {}
    sent_at = counted_at = -float("inf")
    try:
        while True:
            changed.clear()
            ending, now, current = stopping.is_set(), time.monotonic(), report()
            differing = [name for name, value in current.items() if last.get(name) != value]
            if any(name not in COUNTS for name in differing) or (differing and now - counted_at >= counts_seconds):
                last, sent_at, counted_at = current, now, now
                yield b"data: " + orjson.dumps(current) + b"\n\n"
            elif now - sent_at >= keepalive_seconds:
                sent_at = now
                yield KEEPALIVE
            if ending:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await changed.wait()
                await asyncio.sleep(BATCH_SECONDS)
    finally:
        fleet.change_listeners.remove(changed.set)
