"""PodDisruptionBudgets: draining a node evicts one pod of a pool at a time."""

from typing import Any, Final

from mmrouter_operator.render.child import (
    ChildKind,
    RenderInputs,
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
        # An autoscaled pool with a minimum of 1 needs the budget while it runs five. It follows the Deployment's scale,
        # and ``maxUnavailable: 1`` lets the last replica go. For a pool that always has one it would have no effect.
        if (pool.replicas if pool.autoscaling is None else pool.autoscaling.max_replicas) > 1:
            metadata = object_metadata(dep, pool_name(dep, pool), "engine", pool_labels(pool))
            budgets.append(_budget(metadata, pool_pods(dep, pool)))
    return budgets


def _budget(metadata: dict[str, Any], selector: Selector) -> dict[str, Any]:
    # An engine that loads weights or crashes for long must not keep its node from draining.
    spec = {"maxUnavailable": 1, "selector": selector, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    return KIND.manifest(metadata, spec=spec)
