"""Rendered objects: compared with files, checked by the API's schemas and by what must hold for all of them."""

import base64
import copy
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from mmrouter.api import MMRouterDeployment, SpecError, parse_deployment, to_json
from mmrouter_operator.render import SecretData, render
from mmrouter_operator.render.accelerators import ACCELERATORS
from mmrouter_operator.secrets import new_secret_data

GOLDEN = Path(__file__).parent / "golden"


def containers(obj: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = obj["spec"]["template"]["spec"]
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


def deployments(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [obj for obj in objects if obj["kind"] == "Deployment"]


def named(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(obj for obj in objects if (obj["kind"], obj["metadata"]["name"]) == (kind, name))


def change(dep: MMRouterDeployment, **spec: Any) -> MMRouterDeployment:
    obj = to_json(dep)
    obj["spec"].update(spec)
    return parse_deployment(obj)


def with_pool(dep: MMRouterDeployment, **fields: Any) -> MMRouterDeployment:
    return change(dep, pools=[{**to_json(dep)["spec"]["pools"][0], **fields}])


@pytest.mark.parametrize("name", ["shortest", "whole", "sglang"])
def test_rendering_equals_the_golden_file(name: str, secrets: SecretData, request: pytest.FixtureRequest) -> None:
    """A difference restarts engines on upgrade. Where that is meant: MMROUTER_UPDATE_GOLDEN=1, and look at the diff."""
    objects = render(request.getfixturevalue(name), secrets=secrets)
    path = GOLDEN / f"{name}.rendered.yaml"
    text = yaml.safe_dump_all(objects, sort_keys=False, width=200)
    if os.environ.get("MMROUTER_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert yaml.safe_load_all(text)
    assert list(yaml.safe_load_all(path.read_text())) == objects


@pytest.mark.parametrize(
    ("name", "version"), [("shortest", "1.29"), ("whole", "1.35"), ("whole", "1.37"), ("sglang", "1.35")]
)
def test_every_object_is_valid_for_the_api(
    name: str, version: str, secrets: SecretData, request: pytest.FixtureRequest
) -> None:
    """Resource claims are what they are now since 1.34; everything else since 1.29."""
    for obj in render(request.getfixturevalue(name), secrets=secrets):
        kubernetes_validate.validate(obj, version, strict=True)


def test_rendering_is_pure(whole: MMRouterDeployment, secrets: SecretData) -> None:
    before = to_json(whole)
    expected = copy.deepcopy(render(whole, secrets=secrets))
    for obj in render(whole, secrets=secrets):
        _empty(obj)
    assert render(whole, secrets=secrets) == expected
    assert to_json(whole) == before


def _empty(value: Any) -> None:
    """Take everything out of an object, from the inside: what two objects share is then seen to be missing."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _empty(inner)
        value.clear()


def test_every_pod_meets_the_restricted_level(whole: MMRouterDeployment, secrets: SecretData) -> None:
    for obj in deployments(render(whole, secrets=secrets)):
        pod = obj["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for volume in pod["volumes"]:
            assert "hostPath" not in volume
        for container in containers(obj):
            if container["name"] == "exporter":  # the user's own
                continue
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_every_container_mounts_only_its_own_secrets(whole: MMRouterDeployment, secrets: SecretData) -> None:
    """DESIGN.md 7: the engine gets nothing but its API key."""
    objects = render(whole, secrets=secrets)
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
    assert seen == {
        "router": {
            "identity.key",
            "router.curve.secret",
            "router.curve.public",
            "sidecar.curve.public",
            "control.token",
            "engine.key",
        },
        "sidecar": {
            "identity.key",
            "sidecar.curve.secret",
            "sidecar.curve.public",
            "router.curve.public",
            "engine.key",
        },
        "engine": {"engine.key"},
        "exporter": set(),
    }
    assert {key for items in seen.values() for key in items} == set(named(objects, "Secret", "qwen-vl-secrets")["data"])


def test_secret_entries_are_what_was_generated(shortest: MMRouterDeployment) -> None:
    secrets = new_secret_data()
    data = named(render(shortest, secrets=secrets), "Secret", "qwen-vl-secrets")["data"]
    assert len(base64.b64decode(data["identity.key"])) == 32
    assert {len(base64.b64decode(data[key])) for key in data if "curve" in key} == {40}
    assert base64.b64decode(data["control.token"]).decode() == secrets.control_token
    assert new_secret_data() != secrets
    assert secrets.control_token not in repr(secrets)


def test_the_config_map_holds_the_resource(whole: MMRouterDeployment, secrets: SecretData) -> None:
    text = named(render(whole, secrets=secrets), "ConfigMap", "qwen-vl-config")["data"]["deployment.json"]
    assert parse_deployment(json.loads(text)).spec == whole.spec


def test_variables_come_before_their_use(whole: MMRouterDeployment, secrets: SecretData) -> None:
    """Kubernetes expands $(VAR) only from variables that stand earlier, also after a podTemplate added some."""
    for obj in deployments(render(whole, secrets=secrets)):
        for container in containers(obj):
            defined: list[str] = []
            for env in container.get("env", []):
                for name in ("POD_IP", "POD_LOOPBACK"):
                    assert f"$({name})" not in env.get("value", "") or name in defined
                defined.append(env["name"])
            assert len(set(defined)) == len(defined)


def test_the_sidecar_is_native_and_starts_before_the_engine(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    pod = named(render(shortest, secrets=secrets), "Deployment", "qwen-vl-worker")["spec"]["template"]["spec"]
    (sidecar,) = pod["initContainers"]
    assert sidecar["name"] == "sidecar"
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert [container["name"] for container in pod["containers"]] == ["engine"]


def test_selectors_find_their_pods_and_no_others(whole: MMRouterDeployment, secrets: SecretData) -> None:
    objects = render(whole, secrets=secrets)
    selectors = [obj["spec"]["selector"]["matchLabels"] for obj in deployments(objects)]
    for obj in deployments(objects):
        labels = obj["spec"]["template"]["metadata"]["labels"]
        matching = [s for s in selectors if s.items() <= labels.items()]
        assert matching == [obj["spec"]["selector"]["matchLabels"]]
    service = named(objects, "Service", "qwen-vl")["spec"]["selector"]
    found = [obj["metadata"]["name"] for obj in deployments(objects) if service.items() <= _labels(obj).items()]
    assert found == ["qwen-vl-frontend"]


def _labels(obj: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = obj["spec"]["template"]["metadata"]["labels"]
    return labels


@pytest.mark.parametrize(("kind", "resource"), [(kind, row.resource) for kind, row in ACCELERATORS.items()])
def test_an_accelerator_becomes_limit_selector_and_toleration(
    shortest: MMRouterDeployment, secrets: SecretData, kind: str, resource: str | None
) -> None:
    dep = with_pool(shortest, accelerator={"kind": kind}, image="registry.example/engine:1")
    pod = named(render(dep, secrets=secrets), "Deployment", "qwen-vl-worker")["spec"]["template"]["spec"]
    limits = pod["containers"][0]["resources"].get("limits", {})
    if resource is None:
        assert (limits, pod["nodeSelector"], pod["tolerations"]) == ({}, {}, [])
    else:
        assert limits == {resource: "1"}
        assert len(pod["nodeSelector"]) == 1
        assert pod["tolerations"][0]["key"] == resource


def test_claims_replace_the_extended_resource(whole: MMRouterDeployment, secrets: SecretData) -> None:
    pod = named(render(whole, secrets=secrets), "Deployment", "qwen-vl-dra")["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    assert pod["containers"][0]["resources"] == {"claims": [{"name": "gpu"}]}


def test_only_what_concerns_a_pod_restarts_it(whole: MMRouterDeployment, secrets: SecretData) -> None:
    def templates(dep: MMRouterDeployment, keys: SecretData = secrets) -> dict[str, Any]:
        return {obj["metadata"]["name"]: obj["spec"]["template"] for obj in deployments(render(dep, secrets=keys))}

    def restarted(dep: MMRouterDeployment, keys: SecretData = secrets) -> set[str]:
        before, after = templates(whole), templates(dep, keys)
        return {name for name in before if before[name] != after[name]}

    spec = to_json(whole)["spec"]
    scaled = [{**pool, "replicas": 9, "autoscaling": {"maxReplicas": 9}} for pool in spec["pools"]]
    assert restarted(change(whole, pools=scaled)) == set()
    assert restarted(change(whole, frontend={**spec["frontend"], "replicas": 9})) == set()
    assert restarted(change(whole, paused=True, networkPolicy={"enabled": False})) == set()
    assert restarted(change(whole, verification={"onFailure": "Degrade"})) == set()  # a default written out
    assert restarted(change(whole, routing={**spec["routing"], "policy": "roundRobin"})) == {"qwen-vl-frontend"}
    bigger = change(whole, sidecar={**spec["sidecar"], "bufferEvents": 100})
    assert restarted(bigger) == {"qwen-vl-big", "qwen-vl-mig", "qwen-vl-dra", "qwen-vl-host"}
    pools = [{**pool, "args": ["--seed", "1"]} if pool["name"] == "mig" else pool for pool in spec["pools"]]
    assert restarted(change(whole, pools=pools)) == {"qwen-vl-mig"}
    rotated = dataclasses.replace(secrets, engine_key="another")
    assert restarted(whole, rotated) == set(templates(whole))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"podTemplate": {"spce": {}}}, "spec.pools[0].podTemplate.spce: a pod template has"),
        (
            {"podTemplate": {"spec": {"containers": {}}}},
            "spec.pools[0].podTemplate.spec.containers: is a list, not an object",
        ),
        (
            {"podTemplate": {"spec": {"containers": [{"image": "x"}]}}},
            "spec.pools[0].podTemplate.spec.containers: every",
        ),
        (
            {"podTemplate": {"spec": {"containers": [{"name": "engine", "$patch": "delete"}]}}},
            "spec.pools[0].podTemplate.spec.containers: container `engine` cannot be removed",
        ),
        ({"podTemplate": {"spec": None}}, "spec.pools[0].podTemplate.spec.initContainers: container `sidecar` cannot"),
        (
            {
                "podTemplate": {
                    "spec": {"containers": [{"$patch": "replace"}, {"name": "engine", "env": [{"value": "1"}]}]}
                }
            },
            "spec.pools[0].podTemplate.spec.containers.env: every element needs its `name`",
        ),
        ({"accelerator": {"kind": "gaudi"}}, "spec.pools[0].image: there is no default engine image for gaudi"),
        ({"sharedMemory": {"scope": "node"}}, "spec.pools[0].sharedMemory.scope: scope node cannot be deployed"),
    ],
)
def test_what_cannot_be_rendered_is_an_error_with_its_field(
    shortest: MMRouterDeployment, secrets: SecretData, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        render(with_pool(shortest, **fields), secrets=secrets)
    assert str(caught.value).startswith(message)


def test_a_renderer_pool_is_its_engine_alone_with_probes_and_without_a_device(
    shortest: MMRouterDeployment, secrets: SecretData
) -> None:
    pool = {"name": "render", "role": "renderer", "replicas": 2, "accelerator": {"kind": "cpu"}}
    dep = change(shortest, pools=[*to_json(shortest)["spec"]["pools"], {**pool, "image": "registry.example/vllm:cpu"}])
    objects = render(dep, secrets=secrets)
    found = named(objects, "Deployment", f"{dep.metadata.name}-render")
    pod = found["spec"]["template"]["spec"]
    assert found["spec"]["replicas"] == 2
    assert "initContainers" not in pod
    (engine,) = pod["containers"]
    assert engine["command"] == ["vllm", "launch", "render"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"]["path"] == "/health"
    assert "limits" not in engine["resources"]
    mounted = {mount["name"] for mount in engine["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_a_renderer_pool_of_sglang_is_refused_by_a_sentence(sglang: MMRouterDeployment) -> None:
    pool = {"name": "render", "role": "renderer", "accelerator": {"kind": "cpu"}}
    with pytest.raises(SpecError, match=r"renderer pools exist for engine type vllm only"):
        change(sglang, pools=[*to_json(sglang)["spec"]["pools"], pool])


def test_other_roles_are_errors_for_now(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    pools = [*to_json(shortest)["spec"]["pools"], {"name": "e", "role": "encoder", "accelerator": {"kind": "nvidia"}}]
    with pytest.raises(SpecError, match=r"^spec\.pools\[1\]\.role: encoder pools cannot"):
        render(change(shortest, pools=pools), secrets=secrets)


def test_labels_of_ours_survive_a_pod_template(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    patch = {"metadata": {"labels": {"mmrouter.io/pool": "other", "team": "vision"}, "annotations": None}}
    obj = named(render(with_pool(shortest, podTemplate=patch), secrets=secrets), "Deployment", "qwen-vl-worker")
    assert _labels(obj)["mmrouter.io/pool"] == "worker"
    assert _labels(obj)["team"] == "vision"
    assert "mmrouter.io/config-hash" in obj["spec"]["template"]["metadata"]["annotations"]
