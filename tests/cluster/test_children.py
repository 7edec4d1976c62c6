"""Every child as the real server takes it: stored as it was rendered, and with the rights that its pods then have.

The server's own Pod Security admission refuses exactly the pods that we name.
"""

from typing import Any

import pytest
from cluster.controlplane import ControlPlane
from cluster.resources import Object, apply, delete, path
from unit.render.objects import GOLDENS, exceptions, resource
from unit.render.objects import load as golden
from unit.render.test_pods_security import CASES, ENGINES, broken_by, on

from mmrouter_cli.doctor.check_deployment import violated
from mmrouter_lib.api import MMRouterDeployment, parse_deployment
from mmrouter_operator.model.accelerators import ACCELERATORS
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.model.kinds import POD_METRICS_APIS, Capabilities
from mmrouter_operator.render import render

NAMES = ["shortest", "whole", "sglang"]
CAPABILITIES = Capabilities(frozenset(POD_METRICS_APIS))
CONFIG = OperatorConfig(pod_cidrs=("10.244.0.0/16", "fd00:10:244::/56"), api_server_cidrs=("192.0.2.1/32",))


def load(name: str, namespace: str) -> MMRouterDeployment:
    """A golden deployment whose pools are scaled; without a uid, so that its children are not garbage-collected."""
    obj = resource(name)
    obj["metadata"] = {"name": obj["metadata"]["name"], "namespace": namespace}
    for pool, target in zip(obj["spec"]["pools"], ("0.7", "1000", "0.125", "12"), strict=False):
        pool["autoscaling"] = {"maxReplicas": 8, "metric": "queueDepth", "target": target}
    obj["spec"]["observability"] = {"otlpEndpoint": "http://collector:4318"}
    return parse_deployment(obj)


def children(dep: MMRouterDeployment) -> list[Object]:
    return render(dep, secrets=new_secret_data(), capabilities=CAPABILITIES, config=CONFIG)


def differences(rendered: Any, live: Any, where: str = "") -> list[str]:
    """What was rendered and is not stored like that. What the server adds is its own, and it drops what is empty."""
    found: list[str] = []
    if isinstance(rendered, dict) and isinstance(live, dict):
        for key, value in rendered.items():
            if value not in ({}, []) or key in live:
                found += differences(value, live.get(key), f"{where}.{key}")
    elif isinstance(rendered, list) and isinstance(live, list) and len(rendered) == len(live):
        for number, (one, other) in enumerate(zip(rendered, live, strict=True)):
            found += differences(one, other, f"{where}[{number}]")
    elif rendered != live:
        found.append(f"{where}: {rendered!r} is stored as {live!r}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_server_stores_every_child_as_it_was_rendered(cluster: ControlPlane, namespace: str, name: str) -> None:
    """What it stores in another form would look like drift for ever."""
    objects = children(load(name, namespace))
    assert "HorizontalPodAutoscaler" in {obj["kind"] for obj in objects}
    found = [
        f"{obj['kind']} {obj['metadata']['name']}{text}"
        for obj in objects
        for text in differences(obj, apply(cluster, namespace, obj))
    ]
    assert found == []


@pytest.mark.parametrize("name", NAMES)
def test_applying_a_child_again_writes_nothing(cluster: ControlPlane, namespace: str, name: str) -> None:
    """Deployments and autoscalers are left out: their controllers write a status meanwhile."""
    objects = [
        obj
        for obj in children(load(name, namespace))
        if obj["kind"] not in ("Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget")
    ]
    first = [apply(cluster, namespace, obj)["metadata"]["resourceVersion"] for obj in objects]
    again = [apply(cluster, namespace, obj)["metadata"]["resourceVersion"] for obj in objects]
    assert first == again


def test_a_frontend_may_watch_the_pods_of_its_namespace_and_nothing_else(cluster: ControlPlane, namespace: str) -> None:
    dep = load("shortest", namespace)
    for obj in children(dep):
        if obj["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
            apply(cluster, namespace, obj)
    pods = path("Pod", namespace)
    with (
        cluster.client(cluster.token(namespace, "qwen-vl-frontend")) as frontend,
        cluster.client(cluster.token(namespace, "qwen-vl-engine")) as engine,
    ):
        assert frontend.get(pods).status_code == 200
        assert frontend.get(pods, params={"watch": "true", "timeoutSeconds": "1"}).status_code == 200
        assert engine.get(pods).status_code == 403
        for other in (path("Pod", "kube-system"), path("Secret", namespace), path("ConfigMap", namespace)):
            assert frontend.get(other).status_code == 403
        assert frontend.delete(pods).status_code == 403
        assert frontend.patch(f"{pods}/any/status", json={}).status_code == 403
        delete(cluster, "RoleBinding", namespace, "qwen-vl-frontend")


ENFORCED = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/enforce-version": "latest"}


def refused(cluster: ControlPlane, namespace: str, dep: MMRouterDeployment) -> dict[str, str]:
    """Return pool -> what the server has against the security of its pod; a frontend is `frontend`."""
    metadata = dep.metadata.model_copy(update={"namespace": namespace, "uid": ""})
    objects = render(dep.model_copy(update={"metadata": metadata}), secrets=new_secret_data())
    for obj in objects:
        if obj["kind"] == "ServiceAccount":
            apply(cluster, namespace, obj)
    found = {}
    for obj in objects:
        if obj["kind"] != "Deployment":
            continue
        name = obj["metadata"]["name"].removeprefix(f"{dep.metadata.name}-")
        template = obj["spec"]["template"]
        pod = {"metadata": {**template["metadata"], "name": name}, "spec": template["spec"]}
        answer = cluster.request("POST", path("Pod", namespace), pod, dryRun="All")
        if "violates PodSecurity" in (message := str(answer.json().get("message", ""))):
            found[name] = message
    return found


@pytest.mark.parametrize("name", GOLDENS)
def test_the_server_refuses_the_pods_of_our_exceptions_and_no_others(cluster: ControlPlane, name: str) -> None:
    dep = golden(name)
    with cluster.namespace(**ENFORCED) as restricted:
        found = refused(cluster, restricted, dep)
    assert set(found) == {pool for pool, _ in exceptions(dep)}, found


def test_the_server_admits_pods_of_both_engines_on_every_accelerator(cluster: ControlPlane) -> None:
    with cluster.namespace(**ENFORCED) as restricted:
        found = {
            (engine, kind): refused(cluster, restricted, on(kind, engine))
            for engine in ENGINES
            for kind in ACCELERATORS
        }
    assert not any(found.values()), found


@pytest.mark.parametrize("level", ["baseline", "restricted"])
def test_the_server_and_doctor_agree_on_every_way_to_break_a_level(cluster: ControlPlane, level: str) -> None:
    """But for two ways that are no valid pod of ours to begin with: validation refuses them first."""
    labels = {f"pod-security.kubernetes.io/{key}": level for key in ("enforce", "warn")}
    dep = golden("shortest")
    ways = [case for case in CASES if not any(key in case[1] for key in ("procMount", "windowsOptions"))]
    assert len(ways) == len(CASES) - 2
    with cluster.namespace(**labels) as name:
        for place, patch, _ in ways:
            broken = broken_by(dep, place, patch)
            by_server = set(refused(cluster, name, broken))
            by_us = {message.partition(":")[0].removeprefix("pool ") for message in violated(broken, level)}
            assert by_us == by_server, (place, patch)
            assert level == "baseline" or by_server == {"worker"}, (place, patch)
