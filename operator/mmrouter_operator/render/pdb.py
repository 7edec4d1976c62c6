"""PodDisruptionBudgets: draining a node evicts one pod of a pool at a time."""

from typing import Any, Final

from mmrouter_lib.api import Pool
from mmrouter_operator.render.child import ChildKind, RenderInputs
from mmrouter_operator.render.metadata import (
    Selector,
    frontend_name,
    frontend_pods,
    object_metadata,
    pool_labels,
    pool_name,
    pool_pods,
)

KIND: Final = ChildKind("PodDisruptionBudget", "policy/v1", wave=1)


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return a budget for the frontend and for each pool that can have more than one replica."""
    dep, budgets = inputs.dep, []
    if dep.spec.frontend.replicas > 1:
        budgets.append(_budget(object_metadata(dep, frontend_name(dep), "frontend"), frontend_pods(dep)))
    for pool in dep.spec.pools:
        if _max_replicas(pool) > 1:
            metadata = object_metadata(dep, pool_name(dep, pool), "engine", pool_labels(pool))
            budgets.append(_budget(metadata, pool_pods(dep, pool)))
    return budgets


def _max_replicas(pool: Pool) -> int:
    """Return the most replicas that a pool runs.

    For an autoscaled pool that is its maximum: one with a minimum of 1 needs the budget while it runs five. The budget
    follows the Deployment's scale, and ``maxUnavailable: 1`` lets the last replica go, so it blocks no drain when the
    pool has shrunk to one. For a pool that always has one replica it would have no effect.
    """
    return pool.autoscaling.max_replicas if pool.autoscaling is not None else pool.replicas


def _budget(metadata: dict[str, Any], selector: Selector) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {
            "maxUnavailable": 1,
            "selector": selector,
            # An engine that loads weights or crashes for long must not keep its node from draining.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
