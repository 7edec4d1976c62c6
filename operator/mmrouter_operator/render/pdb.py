"""PodDisruptionBudgets: a drained node takes one pod of a pool at a time."""

from typing import Any

from mmrouter_lib.api import MMRouterDeployment, Pool
from mmrouter_operator.render.common import POOL_LABEL, ROLE_LABEL, frontend_name, object_metadata
from mmrouter_operator.render.selectors import Selector, frontend_pods, pool_pods


def render_pdbs(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return a budget for the frontend and for each pool that can have more than one replica."""
    budgets = []
    if dep.spec.frontend.replicas > 1:
        metadata = object_metadata(dep, frontend_name(dep), "frontend")
        budgets.append(_budget(metadata, frontend_pods(dep)))
    for pool in dep.spec.pools:
        if _most_replicas(pool) > 1:
            marks = {POOL_LABEL: pool.name, ROLE_LABEL: pool.role}
            metadata = object_metadata(dep, f"{dep.metadata.name}-{pool.name}", "engine", marks)
            budgets.append(_budget(metadata, pool_pods(dep, pool)))
    return budgets


def _most_replicas(pool: Pool) -> int:
    """Return the most replicas that a pool runs.

    An autoscaled pool is judged by its maximum: one whose minimum is 1 needs the budget while it runs five. The budget
    follows the Deployment's scale, and as ``maxUnavailable`` it lets the last replica go: it blocks no drain when the
    pool has shrunk to one. For a pool that always has one replica it would say nothing.
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
            # An engine may load weights or crash for long: one that serves nobody must not keep its node from draining.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
