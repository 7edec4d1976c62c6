"""Pods and the Pod Security level `restricted`: what meets it, what does not, and whether that is said."""

import copy
from typing import Any

import pytest
from unit.render.objects import (
    Object,
    change,
    container,
    containers,
    deployments,
    exceptions,
    pod_of,
    variables,
    with_pool,
)
from unit.render.test_children import GOLDENS, load

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_lib.api.pod_paths import SHARED_DIR
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SecretData
from mmrouter_operator.render import render
from mmrouter_operator.render.pod.pod_security import violations
from mmrouter_operator.render.pod.shared_memory import SHARED_GROUP

OURS = {"engine", "sidecar", "router", "model-metadata", "handover-plugin"}
CASES: list[tuple[str, Any, str]] = [
    ("", {"hostNetwork": True}, "hostNetwork: the pod shares a namespace of its node"),
    ("", {"hostPID": True}, "hostPID: the pod shares a namespace of its node"),
    ("", {"hostIPC": True}, "hostIPC: the pod shares a namespace of its node"),
    ("volumes", [{"name": "x", "hostPath": {"path": "/"}}], "volume x: hostPath is not among the volumes that"),
    (
        "volumes",
        [{"name": "x", "nfs": {"server": "s", "path": "/"}}],
        "volume x: nfs is not among the volumes that restricted",
    ),
    ("securityContext", {"runAsUser": 0}, "pod: it runs as root"),
    ("securityContext", {"sysctls": [{"name": "kernel.msgmax"}]}, "the sysctl kernel.msgmax is not safe"),
    ("securityContext", {"runAsNonRoot": False}, "container engine: runAsNonRoot is not true"),
    ("securityContext", {"seccompProfile": {"type": "Unconfined"}}, "its seccomp profile is Unconfined"),
    ("securityContext", {"seccompProfile": None}, "its seccomp profile is not set"),
    ("securityContext", {"seLinuxOptions": {"type": "spc_t"}}, "its SELinux options are not of the allowed"),
    ("securityContext", {"appArmorProfile": {"type": "Unconfined"}}, "its AppArmor profile is unconfined"),
    ("engine", {"privileged": True, "allowPrivilegeEscalation": None}, "container engine: it is privileged"),
    ("engine", {"allowPrivilegeEscalation": None}, "container engine: allowPrivilegeEscalation is not false"),
    ("engine", {"capabilities": {"drop": []}}, "container engine: it does not drop all capabilities"),
    ("engine", {"capabilities": {"add": ["SYS_PTRACE"]}}, "container engine: it adds the capabilities SYS_PTRACE"),
    ("engine", {"runAsNonRoot": False}, "container engine: runAsNonRoot is not true"),
    ("engine", {"runAsUser": 0}, "container engine: it runs as root"),
    ("engine", {"procMount": "Unmasked"}, "container engine: procMount is Unmasked"),
    ("engine", {"windowsOptions": {"hostProcess": True}}, "container engine: it is a process of its node"),
    ("ports", [{"name": "h", "containerPort": 1, "hostPort": 1}], "container engine: it takes a port of its node"),
]
"""Where a podTemplate breaks the level, with what, and what is said of it."""


def broken_by(dep: MMRouterDeployment, place: str, patch: Any) -> MMRouterDeployment:
    match place:
        case "":
            spec: Object = patch
        case "engine":
            spec = {"containers": [{"name": "engine", "securityContext": patch}]}
        case "ports":
            spec = {"containers": [{"name": "engine", "ports": patch}]}
        case _:
            spec = {place: patch}
    return with_pool(dep, podTemplate={"spec": spec})


@pytest.mark.parametrize("name", GOLDENS)
def test_every_container_of_ours_meets_the_restricted_level_and_has_a_read_only_root(
    name: str, secrets: SecretData
) -> None:
    for obj in deployments(render(load(name), secrets=secrets)):
        pod = obj["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 65532
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for one in containers(obj):
            if one["name"] in OURS:
                assert one["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }


@pytest.mark.parametrize("name", GOLDENS)
def test_what_a_container_of_ours_said_last_stays_in_its_pods_status(name: str, secrets: SecretData) -> None:
    found = [one for obj in deployments(render(load(name), secrets=secrets)) for one in containers(obj)]
    ours = [one for one in found if one["name"] in {*OURS, "shared-memory"}]
    assert ours
    assert {one["terminationMessagePolicy"] for one in ours} == {"FallbackToLogsOnError"}


@pytest.mark.parametrize("name", [name for name in GOLDENS if name not in ("node", "whole")])
def test_a_deployment_without_exceptions_names_none(name: str) -> None:
    assert exceptions(load(name)) == ()


def test_a_container_that_the_user_adds_is_held_to_the_level_too(whole: MMRouterDeployment) -> None:
    assert {name for name, _ in exceptions(whole)} == {"big"}
    assert all("container exporter: " in sentence for _, sentence in exceptions(whole))


@pytest.mark.parametrize(("place", "patch", "sentence"), CASES)
def test_whatever_breaks_the_level_is_said_with_its_place(
    shortest: MMRouterDeployment, place: str, patch: Any, sentence: str
) -> None:
    found = [text for name, text in exceptions(broken_by(shortest, place, patch)) if name == "worker"]
    assert any(sentence in text for text in found), found
    assert exceptions(shortest) == ()


def test_what_the_level_allows_is_no_exception(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    pod = copy.deepcopy(pod_of(shortest, secrets, "worker"))
    pod["volumes"] += [{"name": "empty"}, {"name": "claim", "persistentVolumeClaim": {"claimName": "c"}}]
    pod["securityContext"]["seccompProfile"] = None
    engine = container(pod, "engine")
    engine["securityContext"]["seccompProfile"] = {"type": "Localhost", "localhostProfile": "p"}
    engine["securityContext"]["capabilities"]["add"] = ["NET_BIND_SERVICE"]
    container(pod, "sidecar")["securityContext"]["seccompProfile"] = {"type": "RuntimeDefault"}
    assert list(violations(pod)) == []


def test_scope_node_is_one_folder_per_deployment_beside_the_pods_own_shared_memory(secrets: SecretData) -> None:
    dep = load("node")
    for pool in ("enc", "worker"):
        pod = pod_of(dep, secrets, pool)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shared"]["hostPath"] == {
            "path": "/dev/shm/mmrouter/inference/near",
            "type": "DirectoryOrCreate",
        }
        for name in ("shared-memory", "sidecar", "engine"):
            mounts = {m["name"]: m["mountPath"] for m in container(pod, name)["volumeMounts"]}
            assert mounts["shared"] == SHARED_DIR
        mounts = {m["name"]: m["mountPath"] for m in container(pod, "engine")["volumeMounts"]}
        assert mounts["shm"] == "/dev/shm"
        assert pod["securityContext"]["supplementalGroups"] == [SHARED_GROUP]
        for name in ("sidecar", "engine"):
            assert variables(container(pod, name))["MMROUTER_SHARED_DIR"] == SHARED_DIR
    assert "hostPath" not in str(pod_of(change(dep, routing={}), secrets, "frontend"))


def test_names_that_join_to_the_same_text_are_different_folders(secrets: SecretData) -> None:
    dep = load("node")

    def path(namespace: str, name: str) -> str:
        metadata = dep.metadata.model_copy(update={"namespace": namespace, "name": name})
        pod = pod_of(dep.model_copy(update={"metadata": metadata}), secrets, "worker")
        found: str = next(v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v)
        return found

    assert path("a-b", "c") != path("a", "b-c")


def test_the_folder_is_opened_by_root_without_a_single_capability_before_the_sidecar_starts(
    secrets: SecretData,
) -> None:
    pod = pod_of(load("node"), secrets, "worker")
    assert [one["name"] for one in pod["initContainers"]] == ["shared-memory", "sidecar"]
    assert pod["initContainers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "runAsUser": 0,
        "runAsGroup": SHARED_GROUP,
        "runAsNonRoot": False,
    }


def test_pools_of_scope_node_prefer_each_others_nodes_and_do_not_insist(secrets: SecretData) -> None:
    """To insist would make a drain of the node wait for ever: no replacement could start elsewhere."""
    for pool in ("enc", "worker"):
        pod = pod_of(load("node"), secrets, pool)
        affinity = pod["affinity"]["podAffinity"]
        assert list(affinity) == ["preferredDuringSchedulingIgnoredDuringExecution"]
        (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        selector = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        obj = next(o for o in render(load("node"), secrets=secrets) if o["metadata"]["name"] == f"near-{pool}")
        assert selector.items() <= obj["spec"]["template"]["metadata"]["labels"].items()
        assert [rule["topologyKey"] for rule in pod["topologySpreadConstraints"]] == ["topology.kubernetes.io/zone"]


def test_scope_node_is_an_exception_of_its_pools_and_of_frontends_that_hand_over() -> None:
    assert {name for name, _ in exceptions(change(load("node"), routing={}))} == {"enc", "worker"}
    found = exceptions(load("node"))
    assert {name for name, _ in found} == {"enc", "worker", "frontend"}
    assert ("worker", "volume shared: hostPath is not among the volumes that restricted allows") in found
    assert ("worker", "container shared-memory: it runs as root") in found


def test_the_site_chooses_the_root_of_the_shared_folders(secrets: SecretData) -> None:
    config = OperatorConfig(shared_memory_root="/mnt/tmpfs")
    assert "/mnt/tmpfs/inference/near" in str(render(load("node"), secrets=secrets, config=config))
