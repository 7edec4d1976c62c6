"""What the chart renders, over a matrix of values."""

import json
import re
from functools import cache

import kubernetes_validate
import pytest
import yaml
from chart.cases import CASES, PROMETHEUS
from chart.helm import CHART, NAMESPACE, ROOT, Helm, Rendered

from mmrouter_lib.api import parse_deployment
from mmrouter_operator.model.config import OperatorConfig, load_config
from mmrouter_operator.model.labels import DEPLOYMENT_LABEL, FRONTEND_ROLE, ROLE_LABEL
from mmrouter_operator.render.frontend import CONTROL_PORT
from mmrouter_operator.render.networkpolicy import OPERATOR_LABELS
from mmrouter_operator.render.pod.parts import METRICS_PORT
from mmrouter_operator.render.pod.pod_security import violations

DOCUMENTED = [
    yaml.safe_load(text)
    for text in re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE | re.DOTALL)
]
NO_SCHEMA = ("MMRouterDeployment", "PodMonitor")
"""Kinds that are not Kubernetes' own."""


@pytest.fixture(params=CASES)
def rendered(request: pytest.FixtureRequest, helm: Helm) -> Rendered:
    values, options = CASES[request.param]
    return helm.render(values, *options)


@pytest.mark.parametrize("example", DOCUMENTED, ids=lambda example: str(next(iter(example))))
def test_values_in_the_documentation_are_taken(helm: Helm, example: dict[str, object]) -> None:
    assert helm.render(example).objects


def test_the_chart_passes_the_linter(helm: Helm) -> None:
    done = helm.run("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.29", "1.35", "1.37"])
def test_objects_have_the_schemas_of_kubernetes(rendered: Rendered, version: str) -> None:
    for obj in rendered.objects:
        if obj["kind"] not in NO_SCHEMA:
            validate(json.dumps(obj), version)


@cache  # most objects are the same in all cases, and the CRD is large
def validate(text: str, version: str) -> None:
    """Raise ``kubernetes_validate.ValidationError`` for an object that has unknown fields or wrong ones."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)


def test_pods_meet_the_level_restricted(rendered: Rendered) -> None:
    assert set(rendered.pods) == {"mmrouter-operator", "mmrouter-operator-test"}
    for name, pod in rendered.pods.items():
        assert list(violations(pod)) == [], name
        assert pod["securityContext"]["runAsUser"] == 65532
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"], name


def test_a_pod_names_its_image_with_a_version(rendered: Rendered) -> None:
    for name, pod in rendered.pods.items():
        for container in pod["containers"]:
            repository, _, version = container["image"].rpartition("@" if "@" in container["image"] else ":")
            assert repository, name
            assert version, name
            assert version != "latest", name


def test_frontends_and_selectors_know_the_operators_pods(rendered: Rendered) -> None:
    deployment = rendered.one("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert OPERATOR_LABELS.items() <= labels.items()
    selectors = [deployment["spec"]["selector"]["matchLabels"], rendered.one("Service")["spec"]["selector"]]
    selectors += [obj["spec"]["selector"]["matchLabels"] for obj in rendered.all("PodDisruptionBudget")]
    selectors += [obj["spec"]["podSelector"]["matchLabels"] for obj in rendered.all("NetworkPolicy")]
    selectors += [obj["spec"]["selector"]["matchLabels"] for obj in rendered.all("PodMonitor")]
    for selector in selectors:
        assert selector.items() <= labels.items()
        # The pod of `helm test` is none of them.
        assert not selector.items() <= rendered.one("Pod")["metadata"]["labels"].items()


def test_every_object_says_whose_it_is(rendered: Rendered) -> None:
    for obj in rendered.objects:
        if obj["kind"] != "CustomResourceDefinition":
            assert obj["metadata"]["labels"]["app.kubernetes.io/part-of"] == "mmrouter", obj["metadata"]["name"]


def test_the_operator_can_read_its_file(rendered: Rendered, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("config") / "operator.yaml"
    file.write_text(rendered.one("ConfigMap", "mmrouter-operator-config")["data"]["operator.yaml"])
    config = load_config(file)
    assert config.image
    (mount,) = (row for row in rendered.operator["volumeMounts"] if row["name"] == "config")
    assert f"--config={mount['mountPath']}/{file.name}" in rendered.operator["args"]


def test_probes_and_scrapes_meet_the_port_that_the_operator_serves(rendered: Rendered) -> None:
    (port,) = rendered.operator["ports"]
    assert (port["name"], port["containerPort"]) == ("metrics", 9090)
    probes = [rendered.operator[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")]
    assert [(probe["path"], probe["port"]) for probe in probes] == [("/healthz", "metrics"), ("/readyz", "metrics")]
    assert rendered.one("Service")["spec"]["ports"][0]["targetPort"] == "metrics"


def test_every_deployment_of_the_values_is_one_that_the_crd_accepts(helm: Helm) -> None:
    values, options = CASES["everything"]
    made = helm.render(values, *options).all("MMRouterDeployment")
    found = {obj["metadata"]["name"]: parse_deployment(obj) for obj in made}
    assert {dep.metadata.namespace for dep in found.values()} == {NAMESPACE, "inference"}
    endpoints = {name: dep.spec.observability.otlp_endpoint for name, dep in found.items()}
    assert endpoints == {"qwen-vl": "http://otel.example:4318", "traced": "http://own.example:4318"}
    assert found["qwen-vl"].spec.routing.media.max_pixels == 64_000_000
    assert all(obj["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for obj in made)


def test_the_configuration_has_a_value_for_every_field(helm: Helm) -> None:
    values, options = CASES["everything"]
    given = yaml.safe_load(
        helm.render(values, *options).one("ConfigMap", "mmrouter-operator-config")["data"]["operator.yaml"]
    )
    assert given == values["operatorConfig"]
    assert set(given) == {field.alias for field in OperatorConfig.model_fields.values()}


def test_another_configuration_restarts_the_operator(helm: Helm) -> None:
    def template(values: dict[str, object]) -> object:
        return helm.render(values).one("Deployment")["spec"]["template"]

    assert template({}) == template({"replicas": 3})
    assert template({}) != template({"operatorConfig": {"hubEndpoint": "https://hub.example"}})


def test_routers_and_sidecars_have_the_operators_image_unless_told_otherwise(helm: Helm) -> None:
    made = helm.render({"image": {"repository": "registry.example/m", "tag": "2"}})
    config = yaml.safe_load(made.one("ConfigMap", "mmrouter-operator-config")["data"]["operator.yaml"])
    assert config["image"] == made.operator["image"] == "registry.example/m:2"


def test_a_pod_monitor_is_there_where_it_is_served_or_demanded(helm: Helm) -> None:
    def monitors(mode: str, *options: str) -> int:
        return len(helm.render({"metrics": {"podMonitor": {"mode": mode}}}, *options).all("PodMonitor"))

    assert (monitors("Auto"), monitors("Auto", PROMETHEUS)) == (0, 1)
    assert (monitors("Enabled"), monitors("Disabled", PROMETHEUS)) == (1, 0)


def test_a_budget_is_there_only_where_a_drain_can_wait_for_another_pod(helm: Helm) -> None:
    assert [len(helm.render({"replicas": n}).all("PodDisruptionBudget")) for n in (0, 1, 2)] == [0, 0, 1]


def test_the_policy_opens_the_api_server_only_where_the_site_says_it_is(helm: Helm) -> None:
    def peers(config: dict[str, object]) -> object:
        egress = helm.render({"operatorConfig": config}).one("NetworkPolicy")["spec"]["egress"]
        (rule,) = (row for row in egress if {"protocol": "TCP", "port": 6443} in row["ports"])
        return rule.get("to")

    assert peers({}) is None
    assert peers({"apiServerCidrs": ["10.1.2.3/32"]}) == [{"ipBlock": {"cidr": "10.1.2.3/32"}}]


def test_where_there_is_no_cluster_to_ask_the_api_server_is_everywhere(helm: Helm) -> None:
    asked = helm.render({"networkPolicy": {"lookupApiServer": True}})
    assert asked.one("NetworkPolicy")["spec"] == helm.render().one("NetworkPolicy")["spec"]
    told = helm.render(
        {"networkPolicy": {"lookupApiServer": True}, "operatorConfig": {"apiServerCidrs": ["fd00::1/128"]}}
    )
    assert {"ipBlock": {"cidr": "fd00::1/128"}} in [
        peer for row in told.one("NetworkPolicy")["spec"]["egress"] for peer in row.get("to", [])
    ]


def test_the_policy_lets_the_operator_follow_every_frontend_and_prometheus_scrape_it(helm: Helm) -> None:
    spec = helm.render().one("NetworkPolicy")["spec"]
    (rule,) = (row for row in spec["egress"] if row["ports"] == [{"protocol": "TCP", "port": CONTROL_PORT}])
    pods = {
        "matchLabels": {ROLE_LABEL: FRONTEND_ROLE},
        "matchExpressions": [{"key": DEPLOYMENT_LABEL, "operator": "Exists"}],
    }
    assert rule["to"] == [{"namespaceSelector": {}, "podSelector": pods}]
    scraped = {"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": METRICS_PORT}]}
    assert spec["ingress"] == [scraped]


def test_a_version_of_kubernetes_without_native_sidecars_is_refused(helm: Helm) -> None:
    assert helm.template({}, "--kube-version=1.29.0").returncode == 0
    old = helm.template({}, "--kube-version=1.28.9")
    assert old.returncode != 0
    assert "requires kubeVersion: >=1.29.0-0" in old.stderr
