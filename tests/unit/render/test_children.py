"""Rendered objects: compared with files, checked by the API's schemas and by what must hold for all of them."""

import base64
import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from unit.render.objects import (
    GOLDEN,
    GOLDENS,
    GROUPS,
    SHORTEST,
    WHOLE,
    change,
    children,
    containers,
    deployments,
    exceptions,
    load,
    named,
    pod_of,
    rendered,
    valid,
    with_pool,
)

from mmrouter_lib.api import MMRouterDeployment, parse_deployment, to_json
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import ROUTER_ITEMS, SIDECAR_ITEMS, new_secret_data
from mmrouter_operator.model.kinds import GATEWAY_API, INFERENCE_POOL_API, POD_MONITOR_API, Capabilities
from mmrouter_operator.render import CHILD_KINDS, render
from mmrouter_operator.render.hpa import METRICS, ROLES

SERVED = Capabilities(frozenset({POD_MONITOR_API}))


class Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


@pytest.mark.parametrize("group", GROUPS)
def test_rendering_equals_the_golden_file(group: str) -> None:
    """A difference restarts engines on upgrade. Where that is meant: MMROUTER_UPDATE_GOLDEN=1, and look at the diff."""
    found = {name: rendered(load(name), capabilities=SERVED) for name in GROUPS[group]}
    path = GOLDEN / f"{group}.yaml"
    if os.environ.get("MMROUTER_UPDATE_GOLDEN") == "1":
        path.write_text(yaml.dump(found, Dumper=Plain, sort_keys=False, width=200))
    assert yaml.safe_load(path.read_text()) == found


@pytest.mark.parametrize("version", ["1.29", "1.35", "1.37"])
@pytest.mark.parametrize("name", GOLDENS)
def test_every_object_is_valid_for_the_api(name: str, version: str) -> None:
    """The oldest version that is supported, that of the test level, and the newest."""
    for obj in rendered(load(name)):
        if version == "1.29" and "resourceClaims" in json.dumps(obj):
            continue  # claims have been what they are since 1.34
        kubernetes_validate.validate(obj, version, strict=True)


def test_rendering_is_pure() -> None:
    before = to_json(WHOLE)
    expected = copy.deepcopy(rendered(WHOLE))
    for obj in rendered(WHOLE):
        _empty(obj)
    assert rendered(WHOLE) == expected
    assert to_json(WHOLE) == before


def _empty(value: Any) -> None:
    """Take everything out of an object, from the inside: what two objects share is then seen to be missing."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _empty(inner)
        value.clear()


def test_every_container_mounts_only_its_own_secrets() -> None:
    """As docs/architecture.md says: the engine gets nothing but its API key."""
    objects = rendered(WHOLE)
    seen: dict[str, set[str]] = {}
    for obj in deployments(objects):
        volumes = {volume["name"]: volume for volume in obj["spec"]["template"]["spec"]["volumes"]}
        for container in containers(obj):
            items = seen.setdefault(container["name"], set())
            for mount in container.get("volumeMounts", []):
                for source in volumes[mount["name"]].get("projected", {}).get("sources", []):
                    items |= {item["key"] for item in source.get("secret", {}).get("items", [])}
            for env in container.get("env", []):
                reference = env.get("valueFrom", {}).get("secretKeyRef", {})
                if reference.get("name") == "qwen-vl-secrets":
                    items.add(reference["key"])
    own = {"router": set(ROUTER_ITEMS), "sidecar": set(SIDECAR_ITEMS), "engine": {"engine.key"}, "exporter": set()}
    assert seen == own
    assert {key for items in seen.values() for key in items} == set(named(objects, "Secret", "qwen-vl-secrets")["data"])


def test_tls_is_served_on_the_client_port_and_health_stays_plain() -> None:
    dep = change(SHORTEST, frontend={"service": {"port": 8443}, "tls": {"secretName": "certificate"}})
    objects = rendered(dep)
    valid(objects)
    (port,) = named(objects, "Service", "qwen-vl")["spec"]["ports"]
    expected = {"name": "https", "appProtocol": "https", "port": 8443, "targetPort": "http", "protocol": "TCP"}
    assert port == expected
    pod = pod_of(dep, "frontend")
    (router,) = pod["containers"]
    (mount,) = (one for one in router["volumeMounts"] if one["mountPath"] == "/etc/mmrouter/tls")
    (volume,) = (one for one in pod["volumes"] if one["name"] == mount["name"])
    assert mount["readOnly"]
    assert volume["secret"] == {"secretName": "certificate", "defaultMode": 0o440}
    probed = {router[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert probed == {"metrics"}


def test_engines_serve_tls_and_only_the_copier_mounts_their_key() -> None:
    dep = change(SHORTEST, engine={"type": "vllm", "tls": {"secretName": "engines"}})
    valid(rendered(dep))
    assert exceptions(dep) == ()
    pool = dep.spec.pools[0].name
    pod = pod_of(dep, pool)
    (engine,) = pod["containers"]
    assert {engine[probe]["httpGet"]["scheme"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        "HTTPS"
    }
    assert engine["args"][engine["args"].index("--ssl-keyfile") + 1] == "/var/lib/mmrouter/tls/tls.key"
    assert "--enable-ssl-refresh" in engine["args"]
    keys = {volume["name"] for volume in pod["volumes"] if volume.get("secret", {}).get("secretName") == "engines"}
    assert [
        container["name"]
        for container in (*pod["initContainers"], engine)
        if keys & {mount["name"] for mount in container["volumeMounts"]}
    ] == ["engine-certificate"]
    for part in (pool, "frontend"):
        sources = [
            source for one in pod_of(dep, part)["volumes"] for source in one.get("projected", {}).get("sources", [])
        ]
        items = [source["secret"]["items"] for source in sources if source.get("secret", {}).get("name") == "engines"]
        assert items == [[{"key": "ca.crt", "path": "engine-ca/ca.crt"}]]


def test_secret_entries_are_what_was_generated() -> None:
    secrets = new_secret_data()
    data = named(render(SHORTEST, secrets=secrets), "Secret", "qwen-vl-secrets")["data"]
    assert len(base64.b64decode(data["identity.key"])) == 32
    assert {len(base64.b64decode(data[key])) for key in data if "curve" in key} == {40}
    assert base64.b64decode(data["control.token"]).decode() == secrets.control_token
    assert new_secret_data() != secrets
    assert secrets.control_token not in repr(secrets)


def test_the_config_map_holds_the_resource() -> None:
    text = named(rendered(WHOLE), "ConfigMap", "qwen-vl-config")["data"]["deployment.json"]
    assert parse_deployment(json.loads(text)).spec == WHOLE.spec


def test_variables_come_before_their_use() -> None:
    """Kubernetes expands $(VAR) only from variables that stand earlier, also after a podTemplate added some."""
    for obj in children(WHOLE, "Deployment"):
        for container in containers(obj):
            defined: list[str] = []
            for env in container.get("env", []):
                for name in ("POD_IP", "POD_LOOPBACK"):
                    assert f"$({name})" not in env.get("value", "") or name in defined
                defined.append(env["name"])
            assert len(set(defined)) == len(defined)


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
def test_a_pool_is_judged_by_the_most_replicas_that_it_can_have(pool: dict[str, Any], has: bool) -> None:
    dep = change(with_pool(SHORTEST, **pool), frontend={"replicas": 1})  # a frontend alone has no budget
    budgets = [budget["metadata"]["name"] for budget in children(dep, "PodDisruptionBudget")]
    assert budgets == (["qwen-vl-worker"] if has else [])


@pytest.mark.parametrize(("mode", "served"), [("Auto", 2), ("Enabled", 2), ("Disabled", 0)])
def test_pod_monitors_are_made_where_the_api_is_unless_they_are_disabled(mode: str, served: int) -> None:
    dep = change(SHORTEST, observability={"podMonitor": mode})
    assert len(children(dep, "PodMonitor", capabilities=SERVED)) == served
    assert children(dep, "PodMonitor") == []


def test_a_port_for_the_live_page_makes_a_service_whose_clients_stay_with_one_frontend() -> None:
    main, page = children(change(SHORTEST, frontend={"service": {"port": 8080, "pagePort": 9000}}), "Service")
    assert main["spec"]["ports"][0]["port"] == 8080
    assert page["metadata"]["name"] == f"{main['metadata']['name']}-page"
    assert (page["spec"]["selector"], page["spec"]["sessionAffinity"]) == (main["spec"]["selector"], "ClientIP")
    assert [(port["port"], port["targetPort"]) for port in page["spec"]["ports"]] == [(9000, "control")]


GATEWAYS = Capabilities(frozenset({GATEWAY_API, INFERENCE_POOL_API}))


def test_an_endpoint_picker_has_a_port_and_a_pool_of_the_workers_where_the_api_is_served() -> None:
    dep = change(SHORTEST, frontend={"mode": "endpointPicker"})
    (pool,) = children(dep, "InferencePool", capabilities=GATEWAYS)
    (service,) = children(dep, "Service")
    (frontend,) = (obj for obj in children(dep, "Deployment") if obj["metadata"]["name"].endswith("-frontend"))
    reference = pool["spec"]["endpointPickerRef"]
    port = next(port for port in service["spec"]["ports"] if port["port"] == reference["port"]["number"])
    assert reference["name"] == service["metadata"]["name"]
    named = {port["name"]: port["containerPort"] for one in containers(frontend) for port in one.get("ports", [])}
    assert named[port["targetPort"]] == 9002
    selected = pool["spec"]["selector"]["matchLabels"]
    workers = [obj for obj in children(dep, "Deployment") if obj is not frontend]
    pods = [obj["spec"]["template"]["metadata"]["labels"] for obj in workers]
    assert [selected.items() <= labels.items() for labels in pods if labels["mmrouter.io/role"] == "worker"] == [True]
    assert not selected.items() <= frontend["spec"]["template"]["metadata"]["labels"].items()
    (policy,) = (obj for obj in children(dep, "NetworkPolicy") if obj["metadata"]["name"].endswith("-frontend"))
    # Its answers hold the engines' key.
    assert 9002 not in [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]


def test_a_picker_of_frontends_has_a_pool_of_them_and_an_open_port() -> None:
    dep = change(WHOLE, frontend={"mode": "frontendPicker"})
    (pool,) = children(dep, "InferencePool", capabilities=GATEWAYS)
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    assert pool["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen"
    selected = pool["spec"]["selector"]["matchLabels"].items()
    found = [
        obj["metadata"]["name"]
        for obj in children(dep, "Deployment")
        if selected <= obj["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert found == [f"{dep.metadata.name}-frontend"]
    (policy,) = (obj for obj in children(dep, "NetworkPolicy") if obj["metadata"]["name"] == found[0])
    assert 9002 in [port["port"] for rule in policy["spec"]["ingress"] if "from" not in rule for port in rule["ports"]]


def test_no_pool_is_made_without_a_picker_or_its_api() -> None:
    assert children(SHORTEST, "InferencePool", capabilities=GATEWAYS) == []
    assert children(change(SHORTEST, frontend={"mode": "endpointPicker"}), "InferencePool") == []


def routed(**frontend: Any) -> MMRouterDeployment:
    gateway = {"parentRefs": [{"name": "public", "namespace": "infra"}], **frontend.pop("gateway", {})}
    return change(SHORTEST, frontend={"gateway": gateway, **frontend})


@pytest.mark.parametrize(
    ("mode", "destination"),
    [
        ("frontend", {"name": "qwen-vl", "port": 8080}),
        ("endpointPicker", {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "qwen-vl"}),
        ("frontendPicker", {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "qwen-vl"}),
    ],
)
def test_a_route_leads_from_the_gateway_to_the_service_or_to_the_pool(mode: str, destination: dict[str, Any]) -> None:
    dep = routed(mode=mode, service={"port": 8080})
    (route,) = children(dep, "HTTPRoute", capabilities=GATEWAYS)
    assert route["spec"] == {
        "parentRefs": [{"name": "public", "namespace": "infra"}],
        "rules": [{"backendRefs": [destination]}],
    }
    kind, name = destination.get("kind", "Service"), destination["name"]
    assert name in [obj["metadata"]["name"] for obj in children(dep, kind, capabilities=GATEWAYS)]


def test_a_route_takes_only_what_its_fields_say() -> None:
    gateway = {
        "parentRefs": [{"name": "public", "sectionName": "https"}],
        "hostnames": ["models.example.com", "*.models.example.com"],
        "modelHeader": "x-gateway-model-name",
        "requestTimeout": "0s",
    }
    (route,) = children(routed(gateway=gateway), "HTTPRoute", capabilities=GATEWAYS)
    assert route["spec"]["parentRefs"] == gateway["parentRefs"]
    assert route["spec"]["hostnames"] == gateway["hostnames"]
    (rule,) = route["spec"]["rules"]
    header = {"type": "Exact", "name": "x-gateway-model-name", "value": SHORTEST.spec.model.served_name}
    assert rule["matches"] == [{"headers": [header]}]
    assert rule["timeouts"] == {"request": "0s"}


def test_no_route_is_made_unless_it_is_wanted_and_its_destination_can_exist() -> None:
    only_routes = Capabilities(frozenset({GATEWAY_API}))
    assert children(SHORTEST, "HTTPRoute", capabilities=GATEWAYS) == []
    assert children(routed(), "HTTPRoute") == []
    assert children(routed(mode="endpointPicker"), "HTTPRoute", capabilities=only_routes) == []
    assert len(children(routed(), "HTTPRoute", capabilities=only_routes)) == 1


def test_a_picker_serves_tls_unless_the_resource_says_otherwise() -> None:
    tls = {"service": {"port": 443}, "tls": {"secretName": "certificate"}}
    protocols = []
    for fields in ({}, tls, {"pickerTls": "none"}, {"pickerTls": "none", **tls}):
        (service,) = children(change(SHORTEST, frontend={"mode": "endpointPicker", **fields}), "Service")
        protocols += [port["appProtocol"] for port in service["spec"]["ports"] if port["name"] == "picker"]
    assert protocols == ["http2", "http2", "kubernetes.io/h2c", "kubernetes.io/h2c"]


TEXT = (Path(__file__).resolve().parents[3] / "docs" / "children.md").read_text()
TABLES = TEXT.split("\n## ")


def rows(section: str) -> list[list[str]]:
    """The cells of a section's tables, without their heads."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| ") and not line.startswith(("| kind", "| to ", "| from ", "| `autoscaling.metric"))
    ]


def test_every_kind_of_child_is_documented_and_no_other() -> None:
    documented = {kind for row in rows(TABLES[0]) for kind in row[0].split(", ")}
    assert documented == CHILD_KINDS.keys()


def test_every_metric_of_an_autoscaler_is_documented_with_its_roles() -> None:
    (section,) = (part for part in TABLES if part.startswith("Autoscaling"))
    documented = {
        row[0].strip("`"): (re.findall(r"`(\w+)`", row[1])[0], set(row[2].split(", "))) for row in rows(section)
    }
    assert documented == {metric: (METRICS[metric], set(ROLES[metric])) for metric in METRICS}


def test_the_settings_that_it_names_are_the_operators() -> None:
    known = {field.alias for field in OperatorConfig.model_fields.values()}
    named = set(re.findall(r"^- `(\w+)`:", TEXT, re.MULTILINE))
    assert named
    assert named <= known
