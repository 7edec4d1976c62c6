"""PodMonitors: where they are wanted and possible, on ports that NetworkPolicy opens for scrapers."""

from collections.abc import Callable
from typing import Any

import pytest
from unit.render.objects import children

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.kinds import POD_MONITOR_API, Capabilities
from mmrouter_operator.render.podmonitor import podmonitor_unavailable

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
