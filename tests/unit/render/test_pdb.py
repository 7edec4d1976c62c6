"""Budgets: one pod of a pool at a time, and never in the way of a drain."""

from collections.abc import Callable
from typing import Any

import pytest
from unit.render.objects import children

from mmrouter_lib.api import MMRouterDeployment, to_json

Change = Callable[..., MMRouterDeployment]


def names(dep: MMRouterDeployment) -> set[str]:
    return {budget["metadata"]["name"] for budget in children(dep, "PodDisruptionBudget")}


def test_budgets_are_valid_for_the_api(
    whole: MMRouterDeployment, valid: Callable[[list[dict[str, Any]]], None]
) -> None:
    valid(children(whole, "PodDisruptionBudget"))


def test_only_what_has_several_replicas_has_a_budget(whole: MMRouterDeployment) -> None:
    assert names(whole) == {"qwen-vl-frontend", "qwen-vl-big"}


@pytest.mark.parametrize(
    ("pool", "has"),
    [
        ({"replicas": 0}, False),
        ({"replicas": 1}, False),
        ({"replicas": 2}, True),
        ({"replicas": 1, "autoscaling": {"minReplicas": 1, "maxReplicas": 8}}, True),
        ({"replicas": 4, "autoscaling": {"minReplicas": 1, "maxReplicas": 1}}, False),
    ],
)
def test_a_pool_is_judged_by_the_most_replicas_that_it_can_have(
    shortest: MMRouterDeployment, changed: Change, pool: dict[str, Any], has: bool
) -> None:
    dep = changed(shortest, pools=[{**to_json(shortest)["spec"]["pools"][0], **pool}])
    assert ("qwen-vl-worker" in names(dep)) is has


def test_one_frontend_has_no_budget(shortest: MMRouterDeployment, changed: Change) -> None:
    assert "qwen-vl-frontend" not in names(changed(shortest, frontend={"replicas": 1}))


def test_a_budget_lets_one_go_and_sick_ones_always(whole: MMRouterDeployment) -> None:
    """``minAvailable`` of a pool that shrank to one replica would hold its node for ever; this never does."""
    for budget in children(whole, "PodDisruptionBudget"):
        assert budget["spec"]["maxUnavailable"] == 1
        assert "minAvailable" not in budget["spec"]
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
