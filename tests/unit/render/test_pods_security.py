"""Pods and the Pod Security level `restricted`: what meets it, what does not, and whether that is reported."""

import copy
from typing import Any

import pytest
from unit.render.objects import (
    GOLDENS,
    SHORTEST,
    WHOLE,
    Object,
    change,
    container,
    exceptions,
    load,
    pod_of,
    rendered,
    with_pool,
)

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.pod.pod_security_violations import violations

CASES: list[tuple[str, Any, str]] = [
    ("", {"hostNetwork": True}, "hostNetwork: the pod shares a namespace of its node"),
    ("", {"hostPID": True}, "hostPID: the pod shares a namespace of its node"),
    ("", {"hostIPC": True}, "hostIPC: the pod shares a namespace of its node"),
    ("volumes", [{"name": "x", "hostPath": {"path": "/"}}], "volume x: hostPath is not among the volumes that"),
    ("volumes", [{"name": "x", "nfs": {"server": "s", "path": "/"}}], "volume x: nfs is not among the volumes that"),
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
"""Where a podTemplate breaks the level, with what, and the sentence about it."""


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


@pytest.mark.parametrize("name", [name for name in GOLDENS if name not in ("node", "whole")])
def test_a_deployment_without_exceptions_names_none(name: str) -> None:
    assert exceptions(load(name)) == ()


def test_a_container_that_the_user_adds_is_held_to_the_level_too() -> None:
    assert {name for name, _ in exceptions(WHOLE)} == {"big"}
    assert all("container exporter: " in sentence for _, sentence in exceptions(WHOLE))


@pytest.mark.parametrize(("place", "patch", "sentence"), CASES)
def test_whatever_breaks_the_level_is_said_with_its_place(place: str, patch: Any, sentence: str) -> None:
    found = [text for name, text in exceptions(broken_by(SHORTEST, place, patch)) if name == "worker"]
    assert any(sentence in text for text in found), found
    assert exceptions(SHORTEST) == ()


def test_what_the_level_allows_is_no_exception() -> None:
    pod = copy.deepcopy(pod_of(SHORTEST, "worker"))
    pod["volumes"] += [{"name": "empty"}, {"name": "claim", "persistentVolumeClaim": {"claimName": "c"}}]
    pod["securityContext"]["seccompProfile"] = None
    engine = container(pod, "engine")
    engine["securityContext"]["seccompProfile"] = {"type": "Localhost", "localhostProfile": "p"}
    engine["securityContext"]["capabilities"]["add"] = ["NET_BIND_SERVICE"]
    container(pod, "sidecar")["securityContext"]["seccompProfile"] = {"type": "RuntimeDefault"}
    assert list(violations(pod)) == []


def test_names_that_join_to_the_same_text_are_different_folders() -> None:
    dep = load("node")

    def path(namespace: str, name: str) -> str:
        metadata = dep.metadata.model_copy(update={"namespace": namespace, "name": name})
        pod = pod_of(dep.model_copy(update={"metadata": metadata}), "worker")
        found: str = next(v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v)
        return found

    assert path("a-b", "c") != path("a", "b-c")


def test_scope_node_is_an_exception_of_its_pools_and_of_frontends_that_hand_over() -> None:
    assert {name for name, _ in exceptions(change(load("node"), routing={}))} == {"enc", "worker"}
    found = exceptions(load("node"))
    assert {name for name, _ in found} == {"enc", "worker", "frontend"}
    assert ("worker", "volume shared: hostPath is not among the volumes that restricted allows") in found
    assert ("worker", "container shared-memory: it runs as root") in found


def test_the_site_chooses_the_root_of_the_shared_folders() -> None:
    config = OperatorConfig(shared_memory_root="/mnt/tmpfs")
    assert "/mnt/tmpfs/inference/near" in str(rendered(load("node"), config=config))
