"""podTemplate over a rendered pod: what it may not change is put back and said; the rest is the user's."""

import copy
from typing import Any

import pytest
from unit.render.objects import container, containers, deployments, named, pod_of, template_labels, with_pool

from mmrouter_lib.api import MMRouterDeployment, SpecError, parse_deployment, to_json
from mmrouter_operator.model.credentials import SecretData
from mmrouter_operator.model.labels import INPUTS_HASH
from mmrouter_operator.render import overridden, render

PATH = "spec.pools[0].podTemplate"


def patched(dep: MMRouterDeployment, secrets: SecretData, patch: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the worker's pod template with a patch, and the places that were put back, within the patch."""
    dep = with_pool(dep, podTemplate=patch)
    obj = named(render(dep, secrets=secrets), "Deployment", f"{dep.metadata.name}-worker")
    places = {place.removeprefix(f"{PATH}.") for place in overridden(dep)}
    return obj["spec"]["template"], places


def in_engine(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


def in_sidecar(**fields: Any) -> dict[str, Any]:
    return {"spec": {"initContainers": [{"name": "sidecar", **fields}]}}


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
            {"podTemplate": {"spec": {"containers": [{"$patch": "replace"}, {"name": "engine", "env": [{}]}]}}},
            "spec.pools[0].podTemplate.spec.containers.env: every element needs its `name`",
        ),
    ],
)
def test_what_cannot_be_laid_over_is_an_error_with_its_field(
    shortest: MMRouterDeployment, secrets: SecretData, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        render(with_pool(shortest, **fields), secrets=secrets)
    assert str(caught.value).startswith(message)


def test_labels_and_hash_of_ours_survive(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    patch = {"metadata": {"labels": {"mmrouter.io/pool": "other", "team": "vision"}, "annotations": None}}
    template, places = patched(shortest, secrets, patch)
    assert template["metadata"]["labels"]["mmrouter.io/pool"] == "worker"
    assert template["metadata"]["labels"]["team"] == "vision"
    assert INPUTS_HASH in template["metadata"]["annotations"]
    assert places == {"metadata.labels.mmrouter.io/pool", f"metadata.annotations.{INPUTS_HASH}"}


def test_readiness_gates_stay_and_others_may_join(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    theirs = [{"conditionType": "site.example/load-balanced"}]
    template, places = patched(shortest, secrets, {"spec": {"readinessGates": theirs}})
    gates = [gate["conditionType"] for gate in template["spec"]["readinessGates"]]
    assert gates == ["mmrouter.io/routable", "mmrouter.io/verified", "site.example/load-balanced"]
    assert len(places) == 2


@pytest.mark.parametrize(
    ("patch", "place"),
    [
        (
            {"spec": {"volumes": [{"name": "config", "emptyDir": {}, "$retainKeys": ["name", "emptyDir"]}]}},
            "spec.volumes[config]",
        ),
        ({"spec": {"volumes": [{"name": "state", "$patch": "delete"}]}}, "spec.volumes[state]"),
        (in_sidecar(command=["sh"]), "spec.initContainers[sidecar].command"),
        (in_sidecar(restartPolicy=None), "spec.initContainers[sidecar].restartPolicy"),
        (
            in_sidecar(volumeMounts=[{"mountPath": "/etc/mmrouter", "name": "tmp", "readOnly": None}]),
            "spec.initContainers[sidecar].volumeMounts[/etc/mmrouter]",
        ),
        (in_sidecar(startupProbe={"httpGet": {"port": 1}}), "spec.initContainers[sidecar].startupProbe.httpGet"),
        (in_engine(readinessProbe={"httpGet": {"path": "/"}}), "spec.containers[engine].readinessProbe.httpGet"),
        (in_engine(ports=[{"containerPort": 8000, "$patch": "delete"}]), "spec.containers[engine].ports[http]"),
        (in_engine(env=[{"name": "POD_IP", "$patch": "delete"}]), "spec.containers[engine].env[POD_IP]"),
        (
            in_engine(env=[{"name": "VLLM_API_KEY", "value": "known", "valueFrom": None}]),
            "spec.containers[engine].env[VLLM_API_KEY]",
        ),
    ],
)
def test_what_we_cannot_do_without_is_put_back_and_named(
    shortest: MMRouterDeployment, secrets: SecretData, patch: dict[str, Any], place: str
) -> None:
    plain, _ = patched(shortest, secrets, {})
    template, places = patched(shortest, secrets, patch)
    assert places == {place}
    assert _comparable(template) == _comparable(plain)


def _comparable(template: dict[str, Any]) -> dict[str, Any]:
    """Return a template without its hash, which depends on the patch, and without the order of keyed lists."""
    found = copy.deepcopy(template)
    del found["metadata"]["annotations"]
    found["spec"]["volumes"].sort(key=lambda volume: volume["name"])
    for one in [*found["spec"]["initContainers"], *found["spec"]["containers"]]:
        for name, key in (("env", "name"), ("ports", "name"), ("volumeMounts", "mountPath")):
            one.get(name, []).sort(key=lambda item: item[key])
    return found


def test_the_rest_is_the_users(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    patch = {
        "spec": {
            "serviceAccountName": "mine",
            "runtimeClassName": "nvidia",
            "terminationGracePeriodSeconds": 600,
            "affinity": None,
            "volumes": [{"name": "hub", "emptyDir": None, "persistentVolumeClaim": {"claimName": "cache"}}],
            "containers": [
                {
                    "name": "engine",
                    "imagePullPolicy": "Always",
                    "livenessProbe": None,
                    "startupProbe": {"failureThreshold": 9},
                    "env": [{"name": "HOME", "value": "/home"}, {"name": "NCCL_DEBUG", "value": "INFO"}],
                }
            ],
        }
    }
    template, places = patched(shortest, secrets, patch)
    assert places == set()
    pod = template["spec"]
    assert (pod["serviceAccountName"], pod["runtimeClassName"], "affinity" in pod) == ("mine", "nvidia", False)
    assert {"name": "hub", "persistentVolumeClaim": {"claimName": "cache"}} in pod["volumes"]
    engine = container(pod, "engine")
    assert "livenessProbe" not in engine
    assert engine["startupProbe"] == {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": 5,
        "failureThreshold": 9,
        "timeoutSeconds": 5,
    }
    env = {item["name"]: item.get("value") for item in engine["env"]}
    assert (env["HOME"], env["NCCL_DEBUG"]) == ("/home", "INFO")


def test_variables_come_before_their_use_after_any_patch(whole: MMRouterDeployment, secrets: SecretData) -> None:
    for obj in deployments(render(whole, secrets=secrets)):
        for one in containers(obj):
            defined: list[str] = []
            for item in one.get("env", []):
                for name in ("POD_IP", "POD_LOOPBACK"):
                    assert f"$({name})" not in item.get("value", "") or name in defined
                defined.append(item["name"])
            assert len(set(defined)) == len(defined)


def test_the_frontends_patch_is_held_to_the_same(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    obj = to_json(shortest)
    obj["spec"]["frontend"] = {
        "podTemplate": {
            "metadata": {"labels": {"mmrouter.io/role": "worker"}},
            "spec": {"containers": [{"name": "router", "command": ["sh"], "args": ["-c", "true"]}]},
        }
    }
    dep = parse_deployment(obj)
    frontend = named(render(dep, secrets=secrets), "Deployment", "qwen-vl-frontend")
    assert template_labels(frontend)["mmrouter.io/role"] == "frontend"
    router = container(pod_of(dep, secrets, "frontend"), "router")
    assert (router["command"], "args" in router) == (["mmrouter", "router"], False)
    assert set(overridden(dep)) == {
        "spec.frontend.podTemplate.metadata.labels.mmrouter.io/role",
        "spec.frontend.podTemplate.spec.containers[router].command",
        "spec.frontend.podTemplate.spec.containers[router].args",
    }
