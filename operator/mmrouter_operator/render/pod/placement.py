"""Where a pod may run, and near whom. Pure."""

from typing import Any

from mmrouter_lib.api import MMRouterDeployment, Pool
from mmrouter_operator.render.common import DEPLOYMENT_LABEL
from mmrouter_operator.render.pod.accelerators import ACCELERATORS, NodeLabel

HOSTNAME = "kubernetes.io/hostname"
ZONE = "topology.kubernetes.io/zone"
SHARED_MEMORY_LABEL = "mmrouter.io/shared-memory"
"""Label of engine pods that share their node's tmpfs directory; its value is the scope. Frontends go where these are
and do not bear it: they should not draw each other onto one node."""


def tolerations(pool: Pool) -> list[dict[str, Any]]:
    """Return the accelerator's toleration and the pool's own."""
    resource = ACCELERATORS[pool.accelerator.kind].resource
    accelerator = {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
    own = [item.model_dump(mode="json", by_alias=True, exclude_none=True) for item in pool.tolerations]
    return [*([accelerator] if resource is not None else []), *own]


def affinity(dep: MMRouterDeployment, pool: Pool) -> dict[str, Any]:
    """Return the pod's affinity; empty where any node will do.

    A claim (DRA) finds its node by the devices themselves; such nodes need no label.
    """
    found: dict[str, Any] = {}
    labels = ACCELERATORS[pool.accelerator.kind].node_labels
    if labels and not pool.accelerator.claims:
        terms = [{"matchExpressions": [_expression(label)]} for label in labels]
        found["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    if pool.shared_memory.scope == "node":
        found |= near_engines(dep)
    return found


def near_engines(dep: MMRouterDeployment) -> dict[str, Any]:
    """Return the affinity of a pod that shares memory with engines.

    Preferred: a required term would hold all pools on one node for good, and a drain of that node would never end,
    because no replacement could start elsewhere. What cannot be handed over on the node travels as bytes.
    """
    shared = {DEPLOYMENT_LABEL: dep.metadata.name, SHARED_MEMORY_LABEL: "node"}
    term = {"labelSelector": {"matchLabels": shared}, "topologyKey": HOSTNAME}
    return {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    }


def spread(selector: dict[str, str], *, together: bool = False) -> list[dict[str, Any]]:
    """Return soft constraints that spread a Deployment's pods over nodes and zones, each revision for itself.

    ``together``: over zones only, because the pods want to share a node.
    """
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(selector)},
            "matchLabelKeys": ["pod-template-hash"],
        }
        for key in ([ZONE] if together else [HOSTNAME, ZONE])
    ]


def _expression(label: NodeLabel) -> dict[str, Any]:
    key, value = label
    return {"key": key, "operator": "Exists"} if value is None else {"key": key, "operator": "In", "values": [value]}
