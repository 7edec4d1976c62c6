"""Which kind of autoscaler scales a pool, by which metric, and what is reported without one."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.render.objects import SHORTEST, WHOLE, change, children, valid

from mmrouter_lib.api import MMRouterDeployment, quantity_value, to_json
from mmrouter_lib.engines.base.adapter import RankLoad
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.kinds import KEDA_API, Capabilities
from mmrouter_operator.render.hpa import METRICS, ROLES, quantity
from mmrouter_operator.render.podmonitor import DEPLOYMENT_TARGET_LABEL, POOL_TARGET_LABEL
from mmrouter_sidecar.metrics import EngineLoad

NOTHING = Capabilities()
ADAPTER = Capabilities(frozenset({"custom.metrics.k8s.io/v1beta1"}))
KEDA = Capabilities(frozenset({KEDA_API}))
BOTH = Capabilities(ADAPTER.apis | KEDA.apis)
BARE = OperatorConfig()
PROMETHEUS = OperatorConfig(prometheus_address="http://prometheus.monitoring.svc:9090")


@pytest.fixture
def scaled() -> MMRouterDeployment:
    pools = to_json(WHOLE)["spec"]["pools"]
    pools[0]["autoscaling"] = {"minReplicas": 2, "maxReplicas": 8, "target": "0.75"}
    pools[1]["autoscaling"] = {"maxReplicas": 3, "metric": "queueDepth", "target": "4"}
    return change(WHOLE, pools=pools)


@pytest.mark.parametrize(
    ("capabilities", "config", "hpas", "objects"),
    [
        (NOTHING, PROMETHEUS, 0, 0),
        (ADAPTER, BARE, 2, 0),
        (KEDA, BARE, 0, 0),
        (KEDA, PROMETHEUS, 0, 2),
        (BOTH, PROMETHEUS, 2, 0),
    ],
)
def test_one_kind_of_autoscaler_is_rendered_or_none(
    scaled: MMRouterDeployment, capabilities: Capabilities, config: OperatorConfig, hpas: int, objects: int
) -> None:
    for kind, count in {"HorizontalPodAutoscaler": hpas, "ScaledObject": objects}.items():
        assert len(children(scaled, kind, capabilities=capabilities, config=config)) == count
        assert children(WHOLE, kind, capabilities=capabilities, config=config) == [], "no pool asks for scaling"


def test_an_hpa_scales_its_pools_deployment_by_the_mean_of_its_pods(scaled: MMRouterDeployment) -> None:
    scalers = children(scaled, "HorizontalPodAutoscaler", capabilities=ADAPTER)
    valid(scalers)
    spec = scalers[0]["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "qwen-vl-big"}
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 8)
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"]["name"] == "mmrouter_sidecar_kv_usage_ratio"
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "750m"}
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300


def test_a_scaled_object_asks_prometheus_for_its_own_pool(scaled: MMRouterDeployment) -> None:
    """Shape: KEDA 2.21's ScaledObject; ``fallback.behavior`` is there since 2.17."""
    spec = children(scaled, "ScaledObject", capabilities=KEDA, config=PROMETHEUS)[0]["spec"]
    fields = "scaleTargetRef pollingInterval minReplicaCount maxReplicaCount fallback advanced triggers"
    assert " ".join(spec) == fields
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "qwen-vl-big"}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 8)
    (trigger,) = spec["triggers"]
    assert trigger["metadata"] == {
        "serverAddress": PROMETHEUS.prometheus_address,
        "query": 'sum(mmrouter_sidecar_kv_usage_ratio{namespace="inference",mmrouter_deployment="qwen-vl",pool="big"})',
        "threshold": "0.75",
        "ignoreNullValues": "false",
    }
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert trigger["metricType"] == "AverageValue"


def test_without_an_answer_the_replicas_stay_within_their_bounds(scaled: MMRouterDeployment) -> None:
    pools = to_json(scaled)["spec"]["pools"]
    for replicas, expected in ((1, 2), (4, 4), (20, 8)):
        pools[0]["replicas"] = replicas
        dep = change(scaled, pools=pools)
        fallback = children(dep, "ScaledObject", capabilities=KEDA, config=PROMETHEUS)[0]["spec"]["fallback"]
        assert fallback["replicas"] == expected
        assert fallback["behavior"] == "currentReplicasIfHigher"


def test_the_query_uses_labels_that_the_pod_monitor_gives() -> None:
    monitors = children(WHOLE, "PodMonitor", capabilities=Capabilities(frozenset({"monitoring.coreos.com/v1"})))
    engine = next(monitor for monitor in monitors if monitor["metadata"]["name"] == "qwen-vl-engine")
    for endpoint in engine["spec"]["podMetricsEndpoints"]:
        given_labels = {rule["targetLabel"] for rule in endpoint["relabelings"]}
        assert {DEPLOYMENT_TARGET_LABEL, POOL_TARGET_LABEL} <= given_labels


def test_every_metric_is_one_that_a_sidecar_exports() -> None:
    load = EngineLoad()
    load.update("", {0: RankLoad()})
    assert set(METRICS.values()) <= {family.name for family in load.collect()}
    assert set(METRICS) == set(ROLES)


@pytest.mark.parametrize(
    ("role", "metric", "possible"),
    [("encoder", "encoderUtilization", True), ("encoder", "kvUsage", False), ("worker", "encoderUtilization", False)],
)
def test_no_pool_is_scaled_by_a_metric_that_its_role_does_not_have(role: str, metric: str, possible: bool) -> None:
    """An HPA over a metric that no process exports would look like autoscaling and do nothing."""
    worker = to_json(SHORTEST)["spec"]["pools"][0]
    extra = {**worker, "name": "extra", "role": role, "autoscaling": {"maxReplicas": 3, "metric": metric}}
    dep = change(SHORTEST, pools=[worker, extra])
    assert len(children(dep, "HorizontalPodAutoscaler", capabilities=ADAPTER)) == possible


@pytest.mark.parametrize(
    ("text", "stored"),
    [("0.7", "700m"), ("1", "1"), ("10", "10"), ("1000", "1k"), ("0", "0"), ("0.0005", "500u"), ("2.50", "2500m")],
)
def test_targets_are_written_as_the_api_server_stores_them(text: str, stored: str) -> None:
    assert quantity(text) == stored


@given(st.decimals(min_value=0, max_value=10**9 - 1, places=6))
def test_a_target_keeps_its_value(value: Decimal) -> None:
    suffixes = {"n": Decimal("1e-9"), "u": Decimal("1e-6")}
    text = quantity(f"{value:f}")
    unit = suffixes.get(text[-1])
    assert (Decimal(text[:-1]) * unit if unit else quantity_value(text)) == value
