"""Pods and the Pod Security level `restricted`: what meets it, what does not, and whether that is reported."""

import copy
from pathlib import Path
from typing import Any

import pytest
from unit.render.objects import (
    GOLDENS,
    SHORTEST,
    WHOLE,
    Object,
    change,
    container,
    containers,
    deployments,
    exceptions,
    load,
    pod_of,
    rendered,
    with_pool,
)

from mmrouter_lib.api import AcceleratorKind, MMRouterDeployment
from mmrouter_operator.model.accelerators import ACCELERATORS
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
    assert {name for name, _ in exceptions(change(load("node"), routing={"transfer": "none"}))} == {"enc", "worker"}
    found = exceptions(load("node"))
    assert {name for name, _ in found} == {"enc", "worker", "frontend"}
    assert ("worker", "volume shared: hostPath is not among the volumes that restricted allows") in found
    assert ("worker", "container shared-memory: it runs as root") in found


def test_the_site_chooses_the_root_of_the_shared_folders() -> None:
    config = OperatorConfig(shared_memory_root="/mnt/tmpfs")
    assert "/mnt/tmpfs/inference/near" in str(rendered(load("node"), config=config))


SECURITY = Path(__file__).resolve().parents[3] / "SECURITY.md"
ROOT_CONTAINERS = {"shared-memory"}
"""Containers that run as root; SECURITY.md names them with the reason."""
ENGINES = ("vllm", "sglang")


def on(kind: AcceleratorKind, engine: str) -> MMRouterDeployment:
    """Return a deployment with a pool on a kind of accelerator."""
    pool = {"name": "worker", "role": "worker", "accelerator": {"kind": kind}}
    return change(SHORTEST, engine={"type": engine, "image": "registry.example/engine:1"}, pools=[pool])


EVERY_POD = {
    **{name: load(name) for name in GOLDENS if name != "whole"},
    **{f"{engine} on {kind}": on(kind, engine) for engine in ENGINES for kind in ACCELERATORS},
}
"""Deployments whose pods have no container of the user's."""


@pytest.mark.parametrize("name", EVERY_POD)
def test_every_container_has_a_read_only_root_no_capability_and_the_runtimes_seccomp_profile(name: str) -> None:
    for deployment in deployments(rendered(EVERY_POD[name])):
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        for each in containers(deployment):
            own = each["securityContext"]
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert own["allowPrivilegeEscalation"] is False
            assert "seccompProfile" not in own
            assert (own.get("runAsUser") == 0) == (each["name"] in ROOT_CONTAINERS)


@pytest.mark.parametrize("name", EVERY_POD)
def test_what_a_container_writes_is_the_pods_own_but_for_shared_directories(name: str) -> None:
    for deployment in deployments(rendered(EVERY_POD[name])):
        pod = deployment["spec"]["template"]["spec"]
        source = {volume["name"]: next(key for key in volume if key != "name") for volume in pod["volumes"]}
        for each in containers(deployment):
            writable = {mount["name"] for mount in each["volumeMounts"] if not mount.get("readOnly")}
            assert {volume for volume in writable if source[volume] != "emptyDir"} <= {"shared", "embeddings"}
        hosts = {volume["name"] for volume in pod["volumes"] if "hostPath" in volume}
        assert hosts <= {"shared", "model"}


@pytest.mark.parametrize("name", EVERY_POD)
def test_only_frontends_hold_a_token_of_the_api_server(name: str) -> None:
    objects = rendered(EVERY_POD[name])
    for deployment in deployments(objects):
        pod = deployment["spec"]["template"]["spec"]
        frontend = deployment["metadata"]["name"].endswith("-frontend")
        assert pod["automountServiceAccountToken"] is frontend
        sources = [part for volume in pod["volumes"] for part in volume.get("projected", {}).get("sources", [])]
        assert not any("serviceAccountToken" in part for part in sources)
    accounts = [obj for obj in objects if obj["kind"] == "ServiceAccount"]
    assert [account["automountServiceAccountToken"] for account in accounts] == [False, False]


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_pods_on_every_accelerator_meet_the_level(kind: AcceleratorKind) -> None:
    for engine in ENGINES:
        assert exceptions(on(kind, engine)) == ()


def test_the_security_page_names_every_exception() -> None:
    found = {sentence.partition(":")[0] for _, sentence in exceptions(load("node"))}
    assert found == {"volume shared", *(f"container {name}" for name in ROOT_CONTAINERS)}
    text = SECURITY.read_text()
    assert all(f"`{place.split()[1]}`" in text for place in found), found
