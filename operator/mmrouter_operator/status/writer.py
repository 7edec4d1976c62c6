"""Writes a deployment's status, Events and condition metrics: only changes, and changed ratios rarely."""

import logging
import math
from typing import Any

from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.cluster.cache import WatchCache
from mmrouter_operator.cluster.child_writer import WriteResult
from mmrouter_operator.cluster.client import ApiError, KubernetesCluster, Object, Refused
from mmrouter_operator.cluster.lease import boot_time
from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.kinds import RESOURCE
from mmrouter_operator.model.snapshot import Key, Snapshot
from mmrouter_operator.planning.planner import RolloutPlan
from mmrouter_operator.planning.pod_readiness_gates import closed_gates
from mmrouter_operator.status.builder import Status, status_of, status_of_failure, urgent
from mmrouter_operator.status.conditions import transitions

log = logging.getLogger(__name__)

_LISTS = {"conditions": "type", "pools": "name"}

QUIET_INTERVAL = 30.0
"""Seconds between writes that change nothing but measured ratios and the wording of messages."""

REFUSED_FOR = 60.0
"""Seconds without another try after the server refused the status of a spec."""


class StatusWriter:
    """Writes statuses, and remembers the last one of each deployment."""

    def __init__(self, cluster: KubernetesCluster, cache: WatchCache, metrics: Metrics) -> None:
        self._cluster = cluster
        self._cache = cache
        self._metrics = metrics
        self._written: dict[Key, tuple[Status, Status, float]] = {}  # key -> status, live status after it, and when
        self._refused: dict[Key, tuple[object, float]] = {}  # key -> generation, and when

    async def write(
        self,
        key: Key,
        resource: Object,
        spec: MMRouterDeployment | SpecError,
        snapshot: Snapshot,
        planned: RolloutPlan | None,
        written: WriteResult,
    ) -> float | None:
        """Write what changed. Returns the seconds until the next reconcile, if one is due."""
        before: dict[str, Any] = resource.get("status") or {}
        status = status_of(spec, snapshot, planned, tuple(written.problems), before)
        shown, live, at = self._written.get(key, (None, None, -math.inf))
        if _shows(before, status) or (shown, live) == (status, before):
            pass
        elif not urgent(before, status) and (wait := at + QUIET_INTERVAL - boot_time()) > 0:
            written.retry_in(wait)
        else:
            await self._send(key, resource, before, status, written)
        for ref in written.repaired:
            note = f"{ref.kind} {ref.name} was changed or deleted by another writer and is repaired"
            await self._event(resource, "Normal", "DriftRepaired", "Apply", note)
        self._metrics.conditions(key, [(item["type"], item["status"]) for item in status.get("conditions", [])])
        self._metrics.closed_gates(key, closed_gates(snapshot))
        return written.again_in

    async def failed(self, key: Key, resource: Object, message: str, now: float) -> None:
        """Report a bug of the operator at a deployment, without reading any state that may have caused it."""
        before: dict[str, Any] = resource.get("status") or {}
        snapshot = Snapshot(resource=resource, now=now, children={}, pods=(), reports={})
        status = status_of_failure(message, snapshot, before)
        if urgent(before, status):
            await self._send(key, resource, before, status, WriteResult())

    async def _send(self, key: Key, resource: Object, before: Status, status: Status, written: WriteResult) -> None:
        generation = resource["metadata"].get("generation")
        refused = self._refused.get(key)
        if refused is not None and refused[0] == generation and boot_time() < refused[1] + REFUSED_FOR:
            return
        try:
            # The uid excludes a new resource of the same name.
            identity = {field: resource["metadata"][field] for field in ("name", "namespace", "uid")}
            manifest = {"apiVersion": resource["apiVersion"], "kind": resource["kind"], "metadata": identity}
            live = await self._cluster.apply_status({**manifest, "status": status})
        except Refused as error:
            # For example, its spec is invalid for the current CRD: no status can be written until the spec is
            # corrected, and that triggers a reconcile.
            self._refused[key] = (generation, boot_time())
            log.warning("the status is refused: %s", error, extra={"namespace": key[0], "object": key[1]})
            if refused is None or refused[0] != generation:
                note = f"the API server refuses the status of this resource: {error}"
                await self._event(resource, "Warning", "StatusRefused", "Reconcile", note)
            return
        self._refused.pop(key, None)
        self._written[key] = (status, live.get("status") or {}, boot_time())
        self._cache.put(RESOURCE, live)
        if live["metadata"].get("generation") != generation:
            # The spec changed meanwhile. The response is in the cache already, so the watch event will change nothing.
            written.retry_in(0.0)
        for event in transitions(before, status):
            await self._event(resource, event.type, event.reason, "Reconcile", event.note)

    def forget(self, key: Key) -> None:
        self._written.pop(key, None)
        self._refused.pop(key, None)
        self._metrics.forget(key)

    def retire(self) -> None:
        """Forget everything: another replica leads."""
        self._written.clear()
        self._refused.clear()
        self._metrics.forget_all()

    async def _event(self, resource: Object, type: str, reason: str, action: str, note: str) -> None:
        try:
            await self._cluster.event(resource, type, reason, action, note)
        except ApiError as error:
            # The condition holds the same information.
            log.warning("an event was not recorded: %s", error, extra={"reason": reason})


def _shows(live: Status, wanted: Status) -> bool:
    """Whether a live status is the wanted one; the server orders lists of named items itself."""

    def by_name(status: Status) -> Status:
        ordered = {key: {item[name]: item for item in status.get(key, [])} for key, name in _LISTS.items()}
        return {**status, **ordered}

    return by_name(live) == by_name(wanted)
