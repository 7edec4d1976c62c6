"""What this router tells the operator: per pod the two questions of docs/architecture.md, and counts that only grow.

A report is plain values, equal while nothing has changed: no clock, no sequence number, no load is in it. So a follower
that compares two reports sees a change exactly where there is one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmrouter_router.encoding.encoder_probes import EncoderProbes, ProbeState
from mmrouter_router.explain.decisions import DecisionCounts
from mmrouter_router.fleet.feed_client import STALE_SECONDS
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.request.renderer_client import ROLE as RENDERER_ROLE
from mmrouter_router.request.renderer_client import Renderer
from mmrouter_router.scheduling.pipeline_form import canary_applies


@dataclass(frozen=True, slots=True)
class Reporter:
    """Makes reports of one router. ``possible``: whether anybody can predict a prompt of this model.

    ``degraded``: the stages that requests go without now, because no pod can do them.
    """

    router_id: str
    engine: str
    fleet: Fleet
    renderer: Renderer
    probes: EncoderProbes
    counts: DecisionCounts
    ready: Callable[[], bool]
    possible: Callable[[], bool]
    degraded: Callable[[], tuple[str, ...]]

    def report(self) -> dict[str, Any]:
        """Return everything that the operator follows, as plain values."""
        workers: dict[str, dict[str, Any]] = {}
        for worker in self.fleet:
            member = worker.member
            draining = member.draining or (worker.heartbeat is not None and worker.heartbeat.draining)
            row = _row(member.uid, member.pool, member.role, self.standing(worker), draining=draining)
            shared = worker.heartbeat.shared if worker.heartbeat is not None else None
            if shared is not None:  # its node's shared directory; how full it is changes with every request
                row["shared"] = {"above": shared.above, "limit": shared.limit}
            workers[member.uid] = row
        for one in self.renderer.state():
            standing = _rendering(one)
            workers[one["uid"]] = _row(one["uid"], one["pool"], RENDERER_ROLE, standing, draining=one["draining"])
        return {
            "router": self.router_id,
            "ready": self.ready(),
            "workers": workers,
            "degraded": list(self.degraded()),
            "decisions": self.counts.decisions,
            "exact_decisions": self.counts.exact,
            "prompt_blocks": self.counts.prompt_blocks,
            "hit_blocks": self.counts.hit_blocks,
        }

    def standing(self, worker: Worker) -> ProbeState:
        """One engine pod with a sidecar, by its role."""
        if worker.member.role == "encoder":
            return self.probes.encoder(worker)
        unheard = self._unheard(worker)
        if not unheard and not worker.sync.synced:
            unheard = "no_snapshot", "the snapshot of its cache has not come yet"
        verified = worker.canary
        if unheard:
            return ProbeState(False, verified, *unheard)
        return ProbeState(True, verified, *self._unproved(worker))

    def _unheard(self, worker: Worker) -> tuple[str, str] | tuple[()]:
        """Why nothing can be sent there, as cause and message; empty where something can."""
        beat = worker.heartbeat
        if beat is None or self.fleet.now() - worker.heartbeat_at > STALE_SECONDS:
            return "not_heard", "its sidecar is not heard"
        if beat.draining or worker.member.draining:
            return "draining", "it lets its last requests finish"
        if beat.engine_state != "up":
            return f"engine_{beat.engine_state}", f"its engine is {beat.engine_state}"
        return ()

    def _unproved(self, worker: Worker) -> tuple[str, str]:
        canary = worker.heartbeat.canary if worker.heartbeat is not None else None
        if worker.canary != "Unknown" and canary is not None:
            return canary.cause, canary.message
        if not canary_applies(worker.member.role):
            return "not_probed", f"no canary is defined for a {worker.member.role} of {self.engine}"
        if not self.possible():
            return "not_modelled", "nobody can predict this model's prompts: requests are placed by affinity"
        return "pending", "its canary has not been answered yet"


def _rendering(one: dict[str, Any]) -> ProbeState:
    if not one["answered"]:
        return ProbeState(False, "Unknown", "not_answered", one["message"] or "it has not answered yet")
    if one["verified"]:
        return ProbeState(True, "True")
    if one["message"]:
        return ProbeState(True, "False", "rendering", one["message"])
    return ProbeState(True, "Unknown", "pending", "no image has been rendered yet")


def _row(uid: str, pool: str, role: str, standing: ProbeState, *, draining: bool) -> dict[str, Any]:
    return {"uid": uid, "pool": pool, "role": role, **standing._asdict(), "draining": draining}
