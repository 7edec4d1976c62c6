"""Budgets, accounts, roles and PodMonitors."""

from collections.abc import Callable
from typing import Any

import pytest
from unit.render.objects import children

from mmrouter_lib.api import MMRouterDeployment, to_json
from mmrouter_operator.model.kinds import POD_MONITOR_API, Capabilities
from mmrouter_operator.render.podmonitor import podmonitor_unavailable
from mmrouter_operator.render.serviceaccount import engine_account, frontend_account

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


Valid = Callable[[list[dict[str, Any]]], None]


def test_accounts_roles_and_bindings_are_valid_for_the_api(whole: MMRouterDeployment, valid: Valid) -> None:
    valid([*children(whole, "ServiceAccount"), *children(whole, "Role"), *children(whole, "RoleBinding")])


def test_no_account_hands_out_its_token_unasked(whole: MMRouterDeployment) -> None:
    accounts = {account["metadata"]["name"]: account for account in children(whole, "ServiceAccount")}
    assert set(accounts) == {"qwen-vl-frontend", "qwen-vl-engine"}
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())


def test_a_frontend_may_read_pods_and_nothing_else(whole: MMRouterDeployment) -> None:
    (role,) = children(whole, "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def test_only_the_frontend_is_bound_to_the_role(whole: MMRouterDeployment) -> None:
    (role,) = children(whole, "Role")
    (binding,) = children(whole, "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": frontend_account(whole), "namespace": whole.metadata.namespace}
    ]
    assert engine_account(whole) != frontend_account(whole)


SERVED = Capabilities(frozenset({POD_MONITOR_API}))
ABSENT = Capabilities()


@pytest.mark.parametrize(
    ("mode", "capabilities", "number", "unavailable"),
    [
        ("Auto", SERVED, 2, False),
        ("Auto", ABSENT, 0, False),
        ("Enabled", SERVED, 2, False),
        ("Enabled", ABSENT, 0, True),
        ("Disabled", SERVED, 0, False),
        ("Disabled", ABSENT, 0, False),
    ],
)
def test_pod_monitors_are_made_where_the_api_is_and_missed_only_where_they_are_demanded(
    shortest: MMRouterDeployment,
    changed: Callable[..., MMRouterDeployment],
    mode: str,
    capabilities: Capabilities,
    number: int,
    unavailable: bool,
) -> None:
    dep = changed(shortest, observability={"podMonitor": mode})
    assert len(children(dep, "PodMonitor", capabilities=capabilities)) == number
    assert podmonitor_unavailable(dep, capabilities) is unavailable


def test_a_pod_monitor_has_the_shape_of_its_api(whole: MMRouterDeployment) -> None:
    """Field names and types as in the CRD of Prometheus operator 0.85."""
    for monitor in children(whole, "PodMonitor", capabilities=SERVED):
        assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
        spec = monitor["spec"]
        assert set(spec) == {"selector", "namespaceSelector", "podMetricsEndpoints"}
        assert spec["namespaceSelector"] == {"matchNames": ["inference"]}
        for endpoint in spec["podMetricsEndpoints"]:
            assert set(endpoint) == {"port", "path", "interval", "relabelings"}
            for rule in endpoint["relabelings"]:
                assert set(rule) <= {"sourceLabels", "targetLabel", "replacement"}


def test_an_engine_is_scraped_through_its_sidecar(whole: MMRouterDeployment) -> None:
    frontend, engine = children(whole, "PodMonitor", capabilities=SERVED)
    assert paths(frontend) == [("metrics", "/metrics")]
    assert paths(engine) == [("metrics", "/metrics"), ("metrics", "/engine/metrics")]


def test_two_endpoints_of_one_port_have_different_series(whole: MMRouterDeployment) -> None:
    engine = children(whole, "PodMonitor", capabilities=SERVED)[1]
    told_apart = [
        [rule["replacement"] for rule in endpoint["relabelings"] if rule["targetLabel"] == "metrics_path"]
        for endpoint in engine["spec"]["podMetricsEndpoints"]
    ]
    assert told_apart == [["/metrics"], ["/engine/metrics"]]


def test_series_carry_deployment_pool_and_role(whole: MMRouterDeployment) -> None:
    for monitor in children(whole, "PodMonitor", capabilities=SERVED):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            rules = {rule["targetLabel"]: rule.get("sourceLabels") for rule in endpoint["relabelings"]}
            assert rules["mmrouter_deployment"] == ["__meta_kubernetes_pod_label_mmrouter_io_deployment"]
            assert rules["pool"] == ["__meta_kubernetes_pod_label_mmrouter_io_pool"]
            assert rules["role"] == ["__meta_kubernetes_pod_label_mmrouter_io_role"]


def paths(monitor: dict[str, Any]) -> list[tuple[str, str]]:
    return [(endpoint["port"], endpoint["path"]) for endpoint in monitor["spec"]["podMetricsEndpoints"]]
