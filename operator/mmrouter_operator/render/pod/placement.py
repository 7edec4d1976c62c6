"""Scheduling of pods: tolerations, affinity and topology spread. Pure."""

from typing import Any

from mmrouter_lib.api import MMRouterDeployment, Pool
from mmrouter_operator.model.accelerators import ACCELERATORS, NodeLabel
from mmrouter_operator.model.labels import DEPLOYMENT_LABEL, SHARED_MEMORY
from mmrouter_operator.render.metadata import Selector

HOSTNAME = "kubernetes.io/hostname"
ZONE = "topology.kubernetes.io/zone"


def tolerations(pool: Pool) -> list[dict[str, Any]]:
    """Return the accelerator's toleration and the pool's own."""
    resource = ACCELERATORS[pool.accelerator.kind].resource
    accelerator = {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
    own = [item.model_dump(mode="json", by_alias=True, exclude_none=True) for item in pool.tolerations]
    return [*([accelerator] if resource is not None else []), *own]


def affinity(dep: MMRouterDeployment, pool: Pool) -> dict[str, Any]:
    """Return the pod's affinity; empty if any node fits.

    A claim (DRA) selects its node by the devices themselves, without node labels.
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

    It is only preferred: a required term would tie all pools to one node, and draining that node would never end,
    because no replacement could start elsewhere. Images that cannot be handed over on the node are sent as bytes.
    """
    shared = {DEPLOYMENT_LABEL: dep.metadata.name, SHARED_MEMORY: "node"}
    term = {"labelSelector": {"matchLabels": shared}, "topologyKey": HOSTNAME}
    return {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    }


def spread(selector: Selector, *, together: bool = False) -> list[dict[str, Any]]:
    """Return soft constraints that spread a Deployment's pods over nodes and zones, per revision.

    ``together``: over zones only, because the pods are better off on one node.
    """
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(selector["matchLabels"])},
            "matchLabelKeys": ["pod-template-hash"],
        }
        for key in ([ZONE] if together else [HOSTNAME, ZONE])
    ]


def _expression(label: NodeLabel) -> dict[str, Any]:
    key, value = label
    return {"key": key, "operator": "Exists"} if value is None else {"key": key, "operator": "In", "values": [value]}
