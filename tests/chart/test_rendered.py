"""What the chart renders, over a matrix of values, and the rights in it."""

import json
import re
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml
from chart.helm import CASES, CHART, NAMESPACE, PROMETHEUS, ROOT, TEMPLATE, Helm, Rendered

from mmrouter_lib.api import parse_deployment
from mmrouter_operator.model.config import OperatorConfig, load_config
from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, FRONTEND_ROLE, ROLE_LABEL
from mmrouter_operator.render.frontend import CONTROL_PORT
from mmrouter_operator.render.networkpolicy import OPERATOR_LABELS
from mmrouter_operator.render.pod.parts import METRICS_PORT
from mmrouter_operator.render.pod.pod_security_violations import violations

DOCUMENTED = [
    yaml.safe_load(text)
    for text in re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE | re.DOTALL)
]
NO_SCHEMA = ("MMRouterDeployment", "PodMonitor", "PrometheusRule")
"""Kinds that are not Kubernetes' own."""


@pytest.fixture(params=CASES)
def rendered(request: pytest.FixtureRequest, helm: Helm) -> Rendered:
    values, options = CASES[request.param]
    return helm.render(values, *options)


@pytest.mark.parametrize("example", DOCUMENTED, ids=lambda example: str(next(iter(example))))
def test_values_in_the_documentation_are_taken(helm: Helm, example: dict[str, object]) -> None:
    assert helm.render(example).objects


def test_the_chart_passes_the_linter(helm: Helm) -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in helm.output("lint", "--strict", CHART)


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
    file.write_text(rendered.config)
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
    given = yaml.safe_load(helm.render(values, *options).config)
    assert given == values["operatorConfig"]
    assert set(given) == {field.alias for field in OperatorConfig.model_fields.values()}


def test_another_configuration_restarts_the_operator(helm: Helm) -> None:
    def template(values: dict[str, object]) -> object:
        return helm.render(values).one("Deployment")["spec"]["template"]

    assert template({}) == template({"replicas": 3})
    assert template({}) != template({"operatorConfig": {"hubEndpoint": "https://hub.example"}})


def test_routers_and_sidecars_have_the_operators_image_unless_told_otherwise(helm: Helm) -> None:
    made = helm.render({"image": {"repository": "registry.example/m", "tag": "2"}})
    assert yaml.safe_load(made.config)["image"] == made.operator["image"] == "registry.example/m:2"


def test_a_pod_monitor_is_there_where_it_is_served_or_demanded(helm: Helm) -> None:
    def monitors(mode: str, *options: str) -> int:
        return len(helm.render({"metrics": {"podMonitor": {"mode": mode}}}, *options).all("PodMonitor"))

    assert (monitors("Auto"), monitors("Auto", PROMETHEUS)) == (0, 1)
    assert (monitors("Enabled"), monitors("Disabled", PROMETHEUS)) == (1, 0)


def test_a_budget_is_there_only_where_a_drain_can_wait_for_another_pod(helm: Helm) -> None:
    assert [len(helm.render({"replicas": n}).all("PodDisruptionBudget")) for n in (0, 1, 2)] == [0, 0, 1]


@pytest.mark.parametrize("lookup", [False, True])
def test_the_policy_opens_the_api_server_only_where_the_site_says_it_is_and_there_is_no_cluster_to_ask(
    helm: Helm, lookup: bool
) -> None:
    def peers(config: dict[str, object]) -> object:
        made = helm.render({"operatorConfig": config, "networkPolicy": {"lookupApiServer": lookup}})
        egress = made.one("NetworkPolicy")["spec"]["egress"]
        (rule,) = (row for row in egress if {"protocol": "TCP", "port": 6443} in row["ports"])
        return rule.get("to")

    assert peers({}) is None
    cidrs = ["10.1.2.3/32", "fd00::1/128"]
    assert peers({"apiServerCidrs": cidrs}) == [{"ipBlock": {"cidr": cidr}} for cidr in cidrs]


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
    assert helm.render({}, "--kube-version=1.29.0").objects
    assert "requires kubeVersion: >=1.29.0-0" in helm.refusal(*TEMPLATE, "--kube-version=1.28.9")


RULES = yaml.safe_load((CHART / "files" / "clusterrole.yaml").read_text())["rules"]
LEASE_RULES = yaml.safe_load((CHART / "files" / "lease-role.yaml").read_text())["rules"]
SUBJECT = {"kind": "ServiceAccount", "name": "mmrouter-operator", "namespace": NAMESPACE}


def granted(made: Rendered) -> list[tuple[str, str, str, Any]]:
    """Return (kind, name, namespace, rules) of every bound role, sorted."""
    found = []
    for binding in made.all("ClusterRoleBinding") + made.all("RoleBinding"):
        assert binding["subjects"] == [SUBJECT]
        reference = binding["roleRef"]
        role = next(
            role
            for role in made.all(reference["kind"])
            if role["metadata"]["name"] == reference["name"]
            and role["metadata"].get("namespace") == binding["metadata"].get("namespace")
        )
        found.append((role["kind"], role["metadata"]["name"], role["metadata"].get("namespace", ""), role["rules"]))
    return sorted(found, key=lambda row: row[:3])


def test_a_cluster_wide_operator_has_the_rules_of_the_files(helm: Helm) -> None:
    assert granted(helm.render()) == [
        ("ClusterRole", "mmrouter-operator", "", RULES),
        ("Role", "mmrouter-operator-lease", NAMESPACE, LEASE_RULES),
    ]


def test_an_operator_for_namespaces_has_the_same_rules_there_and_nothing_cluster_wide(helm: Helm) -> None:
    values, options = CASES["one team"]
    made = helm.render(values, *options)
    assert granted(made) == [
        ("Role", "mmrouter-operator", "team-a", RULES),
        ("Role", "mmrouter-operator", "team-b", RULES),
        ("Role", "mmrouter-operator-lease", NAMESPACE, LEASE_RULES),
    ]
    assert "--namespace=team-a,team-b" in made.operator["args"]
    # A team without rights on the cluster can install this.
    assert not [obj["kind"] for obj in made.objects if not obj["metadata"].get("namespace")]


def test_no_rule_is_a_wildcard() -> None:
    for rule in RULES + LEASE_RULES:
        assert not [word for row in rule.values() for word in row if "*" in word], rule


def test_what_is_bound_is_the_account_that_the_pods_use(rendered: Rendered) -> None:
    name = rendered.pods["mmrouter-operator"]["serviceAccountName"]
    assert [obj["metadata"]["name"] for obj in rendered.all("ServiceAccount")] in ([name], [])
    bindings = rendered.all("ClusterRoleBinding") + rendered.all("RoleBinding")
    subjects = [row for obj in bindings for row in obj["subjects"]]
    assert {row["name"] for row in subjects} <= {name}


def test_without_rbac_nothing_is_granted(helm: Helm) -> None:
    kinds = {obj["kind"] for obj in helm.render({"rbac": {"create": False}}).objects}
    assert not kinds & {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}


def test_users_of_a_namespace_get_models_beside_what_they_have(helm: Helm) -> None:
    made = helm.render()
    view, edit = (made.one("ClusterRole", name) for name in ("mmrouter-view", "mmrouter-edit"))
    for role, to in ((view, {"view"}), (edit, {"edit", "admin"})):
        prefix = "rbac.authorization.k8s.io/aggregate-to-"
        assert {key.removeprefix(prefix) for key in role["metadata"]["labels"] if key.startswith(prefix)} == to
        assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {"mmrouter.io"}
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    # A status is the operator's word.
    writable = {name for rule in edit["rules"] for name in rule["resources"]}
    assert writable == {"mmrouterdeployments", "mmrouterdeployments/scale"}
    without = helm.render({"rbac": {"aggregate": False}})
    assert [role["metadata"]["name"] for role in without.all("ClusterRole")] == ["mmrouter-operator"]
