"""The condition of the memory that the pods of a node share: whether there is room to hand images over. Pure.

The janitors in the sidecars measure it and frontends pass on what they say: one bit and the limit, because how full it
is changes with every request. The bit has a wide gap between on and off, so the condition does not flicker.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.snapshot import Snapshot
from mmrouter_operator.planning.readiness_gates import counted_frontends, counted_reports, ready_frontends
from mmrouter_operator.status import conditions as c
from mmrouter_operator.status.conditions import Condition, condition


def of_pressure(dep: MMRouterDeployment, snapshot: Snapshot, last: Mapping[str, Any] | None) -> Condition | None:
    """Return the condition, ``None`` where no pool shares memory. ``last``: what it said before."""
    if not any(pool.shared_memory.scope == "node" for pool in dep.spec.pools):
        return None
    before = last or {}
    if not counted_frontends(snapshot) and ready_frontends(snapshot) and before.get("reason") in c.REASONS[c.PRESSURE]:
        # An operator that has just started knows nothing yet; what it said last still stands.
        return condition(c.PRESSURE, str(before["reason"]), str(before.get("message", "")))
    if not any(snapshot.reports.get(front.uid) for front in counted_frontends(snapshot)):
        return condition(c.PRESSURE, "FrontendNotHeard", "no frontend has told yet how full the nodes' directories are")
    told = sorted(_told(snapshot))
    if not told:
        return condition(c.PRESSURE, "NotMeasured", "no sidecar has told yet how full its node's directory is")
    full: dict[str, tuple[str, int]] = {}
    for node, pod, limit, above in told:
        if above:
            full.setdefault(node, (pod, limit))  # one pod speaks for its node
    if not full:
        return condition(c.PRESSURE, "BelowHighWaterMark", "there is room in the shared directory of every node")
    said = "; ".join(f"node {node}, as pod {pod} says, of {_mebibytes(limit)}" for node, (pod, limit) in full.items())
    return condition(
        c.PRESSURE,
        "AboveHighWaterMark",
        f"images travel inside requests until there is room again in the shared directory of {said}",
    )


def _told(snapshot: Snapshot) -> Iterator[tuple[str, str, int, bool]]:
    """Yield node, pod, limit in bytes, and whether some frontend has heard that the mark is passed."""
    for pod in snapshot.pods:
        found = [
            report.shared
            for report in counted_reports(pod, snapshot)
            if report is not None and report.shared is not None
        ]
        if found and not pod.deleting:
            yield pod.node or pod.name, pod.name, max(one.limit for one in found), any(one.above for one in found)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
