"""Rendered objects: compared with files, checked by the API's schemas and by what must hold for all of them."""

import base64
import copy
import json
import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from unit.render.objects import containers, deployments, named, template_labels

from mmrouter_lib.api import MMRouterDeployment, parse_deployment, to_json
from mmrouter_operator.model.credentials import SecretData, new_secret_data
from mmrouter_operator.render import render

GOLDEN = Path(__file__).parent / "golden"
GOLDENS = ("shortest", "whole", "sglang", "disaggregated", "sglang-disaggregated", "node", "handover")


def load(name: str) -> MMRouterDeployment:
    return parse_deployment(yaml.safe_load((GOLDEN / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("name", GOLDENS)
def test_rendering_equals_the_golden_file(name: str, secrets: SecretData) -> None:
    """A difference restarts engines on upgrade. Where that is meant: MMROUTER_UPDATE_GOLDEN=1, and look at the diff."""
    objects = render(load(name), secrets=secrets)
    path = GOLDEN / f"{name}.rendered.yaml"
    text = yaml.safe_dump_all(objects, sort_keys=False, width=200)
    if os.environ.get("MMROUTER_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert yaml.safe_load_all(text)
    assert list(yaml.safe_load_all(path.read_text())) == objects


@pytest.mark.parametrize("version", ["1.29", "1.35", "1.37"])
@pytest.mark.parametrize("name", GOLDENS)
def test_every_object_is_valid_for_the_api(name: str, version: str, secrets: SecretData) -> None:
    """The oldest version that is supported, that of the test level, and the newest."""
    objects = render(load(name), secrets=secrets)
    for obj in objects:
        if version == "1.29" and "resourceClaims" in json.dumps(obj):
            continue  # claims have been what they are since 1.34
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


def test_every_container_mounts_only_its_own_secrets(whole: MMRouterDeployment, secrets: SecretData) -> None:
    """As docs/architecture.md says: the engine gets nothing but its API key."""
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


def test_selectors_find_their_pods_and_no_others(whole: MMRouterDeployment, secrets: SecretData) -> None:
    objects = render(whole, secrets=secrets)
    selectors = [obj["spec"]["selector"]["matchLabels"] for obj in deployments(objects)]
    for obj in deployments(objects):
        labels = obj["spec"]["template"]["metadata"]["labels"]
        matching = [s for s in selectors if s.items() <= labels.items()]
        assert matching == [obj["spec"]["selector"]["matchLabels"]]
    service = named(objects, "Service", "qwen-vl")["spec"]["selector"]
    found = [obj["metadata"]["name"] for obj in deployments(objects) if service.items() <= template_labels(obj).items()]
    assert found == ["qwen-vl-frontend"]
