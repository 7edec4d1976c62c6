"""The chart's gateway: off by default, with least rights, and started by options that the command knows."""

import json
from typing import Any

import kubernetes_validate
import pytest
import yaml
from chart.helm import NAMESPACE, PROMETHEUS, TEMPLATE, Helm, Rendered
from typer.testing import CliRunner

from mmrouter_cli.app import app
from mmrouter_lib.api import quantity_bytes
from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, FRONTEND_ROLE, ROLE_LABEL
from mmrouter_operator.render.frontend import HTTP_PORT
from mmrouter_operator.render.networkpolicy import OPERATOR_LABELS
from mmrouter_operator.render.pod.pod_security_violations import violations
from mmrouter_router.gateway import config

NAME = "mmrouter-gateway"
ON: dict[str, Any] = {"gateway": {"enabled": True}}
EVERYTHING = yaml.safe_load("""
gateway:
  enabled: true
  replicas: 3
  namespace: inference
  selector: "team=a,tier!=test"
  models: {gpt-4o: {to: [{deployment: a, weight: 95}, {deployment: b, weight: 5, model: adapter}]}}
  maxRequestBytes: 128Mi
  maxHeldBytes: 1Gi
  service: {type: LoadBalancer, port: 443, annotations: {example.com/internal: "true"}}
  tls: {secretName: certificate}
  apiKeys: {secretName: keys}
  deploymentsCa: {secretName: ca}
imagePullSecrets: [{name: regcred}]
tolerations: [{key: x, operator: Exists}]
priorityClassName: high
""")


def gateway_of(made: Rendered) -> list[dict[str, Any]]:
    return [obj for obj in made.objects if obj["metadata"]["name"] == NAME]


@pytest.fixture(params=[ON, EVERYTHING], ids=["defaults", "everything"])
def made(request: pytest.FixtureRequest, helm: Helm) -> Rendered:
    return helm.render(request.param, PROMETHEUS)


def container_of(made: Rendered) -> dict[str, Any]:
    container: dict[str, Any] = made.pods[NAME]["containers"][0]
    return container


def test_the_gateway_is_off_by_default_and_changes_no_other_object(helm: Helm, made: Rendered) -> None:
    assert gateway_of(helm.render({}, PROMETHEUS)) == []
    others = [obj for obj in helm.render(ON, PROMETHEUS).objects if obj["metadata"]["name"] != NAME]
    assert others == list(helm.render({}, PROMETHEUS).objects)


def test_its_objects_are_those_of_kubernetes_and_its_pods_meet_the_level_restricted(made: Rendered) -> None:
    assert sorted(obj["kind"] for obj in gateway_of(made)) == [
        *("ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "Role", "RoleBinding"),
        *("Service", "ServiceAccount"),
    ]
    for obj in gateway_of(made):
        if obj["kind"] != "PodMonitor":
            for version in ("1.29", "1.37"):
                kubernetes_validate.validate(json.loads(json.dumps(obj)), version, strict=True)
    assert list(violations(made.pods[NAME])) == []
    assert container_of(made)["securityContext"]["readOnlyRootFilesystem"]


def test_selectors_find_its_pods_and_none_of_the_operators(made: Rendered) -> None:
    deployment = made.one("Deployment", NAME)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [deployment["spec"]["selector"]["matchLabels"], made.one("Service", NAME)["spec"]["selector"]]
    selectors += [
        made.one(kind, NAME)["spec"]["selector"]["matchLabels"] for kind in ("PodDisruptionBudget", "PodMonitor")
    ]
    selectors.append(made.one("NetworkPolicy", NAME)["spec"]["podSelector"]["matchLabels"])
    operator = made.one("Deployment", "mmrouter-operator")["spec"]["template"]["metadata"]["labels"]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= operator.items()
    # Frontends open their control port to pods with these labels.
    assert not OPERATOR_LABELS.items() <= labels.items()


def test_it_may_list_and_watch_the_deployments_of_their_namespace_and_nothing_else(helm: Helm) -> None:
    for values, namespace in ((ON, NAMESPACE), (EVERYTHING, "inference")):
        made = helm.render(values)
        role, binding = made.one("Role", NAME), made.one("RoleBinding", NAME)
        right = {"apiGroups": ["mmrouter.io"], "resources": ["mmrouterdeployments"], "verbs": ["list", "watch"]}
        assert role["rules"] == [right]
        assert {role["metadata"]["namespace"], binding["metadata"]["namespace"]} == {namespace}
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}]
        assert binding["roleRef"]["name"] == NAME
        assert made.pods[NAME]["serviceAccountName"] == NAME
        assert f"--namespace={namespace}" in container_of(made)["args"]
    assert not [obj for obj in gateway_of(helm.render({**ON, "rbac": {"create": False}})) if "Role" in obj["kind"]]


def test_the_command_knows_every_option_and_every_mount_is_there(helm: Helm) -> None:
    assert container_of(helm.render(EVERYTHING))["command"] == ["mmrouter", "gateway"]
    shown = CliRunner().invoke(app, ["gateway", "--help"], env={"COLUMNS": "200"}).stdout
    given = dict(option.split("=", 1) for option in container_of(helm.render(EVERYTHING))["args"])
    assert [option for option in given if option not in shown] == []
    assert given["--selector"] == "team=a,tier!=test"
    assert quantity_bytes(given["--max-held-bytes"]) == 1 << 30
    mounts = {mount["mountPath"]: mount["name"] for mount in container_of(helm.render(EVERYTHING))["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in helm.render(EVERYTHING).pods[NAME]["volumes"]}
    assert mounts.keys() >= {given["--tls"], given["--api-keys"], given["--ca"]}
    assert set(mounts.values()) == volumes.keys()
    assert volumes["tls"]["secret"]["secretName"] == "certificate"
    assert volumes["api-keys"]["secret"]["secretName"] == "keys"
    assert volumes["ca"]["secret"] == {
        "secretName": "ca",
        "defaultMode": 0o440,
        "items": [{"key": "ca.crt", "path": "ca.crt"}],
    }


def test_the_process_reads_the_aliases_that_the_values_give_and_a_change_restarts_no_pod(helm: Helm) -> None:
    made = helm.render(EVERYTHING)
    aliases = config.parse(made.one("ConfigMap", NAME)["data"]["gateway.yaml"].encode())
    assert {name: [target.model_dump() for target in to] for name, to in aliases.items()} == {
        "gpt-4o": [{"deployment": "a", "weight": 95, "model": ""}, {"deployment": "b", "weight": 5, "model": "adapter"}]
    }
    plain = helm.render(ON)
    assert config.parse(plain.one("ConfigMap", NAME)["data"]["gateway.yaml"].encode()) == {}
    aliased = helm.render({"gateway": {"enabled": True, "models": {"m": {"to": [{"deployment": "a"}]}}}})
    assert aliased.one("Deployment", NAME) == plain.one("Deployment", NAME)


def test_its_policy_opens_the_frontends_of_the_namespace_the_name_servers_and_the_api_server(helm: Helm) -> None:
    made = helm.render({**EVERYTHING, "operatorConfig": {"apiServerCidrs": ["10.1.2.3/32"]}})
    spec = made.one("NetworkPolicy", NAME)["spec"]
    *common, frontends = spec["egress"]
    assert common == made.one("NetworkPolicy", "mmrouter-operator")["spec"]["egress"][:-1]
    assert common[1]["to"] == [{"ipBlock": {"cidr": "10.1.2.3/32"}}]
    pods = {
        "matchLabels": {ROLE_LABEL: FRONTEND_ROLE},
        "matchExpressions": [{"key": DEPLOYMENT_LABEL, "operator": "Exists"}],
    }
    namespace = {"matchLabels": {"kubernetes.io/metadata.name": "inference"}}
    assert frontends == {
        "to": [{"namespaceSelector": namespace, "podSelector": pods}],
        "ports": [{"protocol": "TCP", "port": HTTP_PORT}],
    }
    ports = {port["name"]: port["containerPort"] for port in container_of(made)["ports"]}
    assert [rule["ports"][0]["port"] for rule in spec["ingress"]] == [ports["http"], ports["metrics"]]


def test_two_pods_take_turns_in_a_rollout_and_one_has_no_budget(helm: Helm) -> None:
    deployment = helm.render(ON).one("Deployment", NAME)["spec"]
    assert (deployment["replicas"], deployment["strategy"]["rollingUpdate"]["maxUnavailable"]) == (2, 0)
    single = helm.render({"gateway": {"enabled": True, "replicas": 1}})
    assert "PodDisruptionBudget" not in [obj["kind"] for obj in gateway_of(single)]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"models": {"m": {}}}, "at '/gateway/models/m': missing property 'to'"),
        ({"models": {"m": {"to": [{"deployment": "a", "weight": 0.5}]}}}, "/to/0/weight': got number, want integer"),
        ({"models": {"m": {"to": [{"name": "a"}]}}}, "at '/gateway/models/m/to/0'"),
        ({"replicas": "2"}, "at '/gateway/replicas': got string, want integer"),
        ({"maxHeldBytes": "much"}, "at '/gateway/maxHeldBytes'"),
        ({"tls": {"secret": "x"}}, "at '/gateway/tls': additional properties 'secret' not allowed"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(helm: Helm, values: dict[str, Any], sentence: str) -> None:
    assert sentence in helm.refusal(*TEMPLATE, values={"gateway": values})


def test_names_that_look_like_numbers_stay_texts(helm: Helm) -> None:
    values = {
        "gateway": {"enabled": True, "namespace": "1234", "tls": {"secretName": "12"}},
        "serviceAccount": {"name": "77"},
        "dashboard": {"namespace": "5"},
        "priorityClassName": "1e3",
    }
    rendered = helm.render(values)
    role = rendered.one("Role", NAME)
    assert role["metadata"]["namespace"] == "1234"
    pod = rendered.one("Deployment", NAME)["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "1e3"
    assert {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume} == {"12"}
    policy = rendered.one("NetworkPolicy", NAME)
    assert '"1234"' in json.dumps(policy["spec"]["egress"])
    assert rendered.one("ServiceAccount", "77")
    assert rendered.one("ConfigMap", "mmrouter-dashboard")["metadata"]["namespace"] == "5"
