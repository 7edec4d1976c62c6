"""Memory-backed files of a pod: an engine's own /dev/shm, and with ``scope: node`` a directory that pods share.

The shared one is a folder on the node's tmpfs. It lies beside the pod's own /dev/shm, at a path of its own, because
engines put private segments into /dev/shm whose names meet if two pods see one folder. Frontends have it too where
images are handed over (``routing.transfer``): they write what engines read.
"""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool, quantity_bytes
from mmrouter_lib.api.shared_types import Resources
from mmrouter_lib.pod_paths import SHARED_DIR
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.pod import parts

SHARED_GROUP: Final = 65533
"""Group that owns the directory and what lies in it. ``fsGroup`` has no effect on a hostPath."""


def is_shared(pool: Pool) -> bool:
    return pool.shared_memory.scope == "node"


def frontends_share(dep: MMRouterDeployment) -> bool:
    return dep.spec.transfer != "none" and any(is_shared(pool) for pool in dep.spec.pools)


def limit_bytes(dep: MMRouterDeployment) -> int:
    """Return what a node's directory may hold in all: the largest size of the pools that use it; 0 without any.

    The kernel does not know this limit, because the file system is the node's: each writer enforces it.
    """
    return max((quantity_bytes(pool.shared_memory.size) for pool in dep.spec.pools if is_shared(pool)), default=0)


def own_volume(pool: Pool) -> dict[str, Any]:
    return {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pool.shared_memory.size}}


def own_mount() -> dict[str, Any]:
    """Return the mount of the pod's own memory-backed files, the same in every container that has it."""
    return parts.mount("shm", "/dev/shm")  # noqa: S108 - a path in the pod


def shared_volume(dep: MMRouterDeployment, config: OperatorConfig) -> dict[str, Any]:
    """Return the volume with the shared directory: the resource's, or a folder of the node.

    Of the latter, namespace and name are folders of their own: joined by a dash, two could be one. Raises ``SpecError``
    for a malformed source.
    """
    if (source := dep.spec.routing.shared_volume) is not None:
        return parts.named_volume("shared", source, "spec.routing.sharedVolume")
    path = f"{config.shared_memory_root}/{dep.metadata.namespace}/{dep.metadata.name}"
    return {"name": "shared", "hostPath": {"path": path, "type": "DirectoryOrCreate"}}


def shared_mount() -> dict[str, Any]:
    return parts.mount("shared", SHARED_DIR)


def shared_env(dep: MMRouterDeployment, writer: Resources | None = None) -> list[dict[str, Any]]:
    """Return the variables that name the node's directory and how many bytes the container may have there.

    ``writer``: the resources of a container that writes; ``None``: of one that watches what all of them have together.
    What is written counts against the writer's own memory limit, so it may fill at most half of that.
    """
    limit = limit_bytes(dep)
    return [
        parts.value_env("MMROUTER_SHARED_DIR", SHARED_DIR),
        parts.value_env("MMROUTER_SHARED_LIMIT_BYTES", str(limit if writer is None else writable(limit, writer))),
    ]


def writable(limit: int, writer: Resources) -> int:
    """Return how many of ``limit`` bytes of memory a container may fill that has these resources."""
    return min(limit, quantity_bytes(writer.limits["memory"]) // 2) if "memory" in writer.limits else limit


def prepare(dep: MMRouterDeployment, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return the init container that opens the node's folder to the group; the kubelet makes it for root alone.

    Without a hostPath there is none: the kubelet gives other volumes to the pod's ``fsGroup``. It is root, and in the
    group, so that it needs no capability: an owner may hand a folder to a group of its own.
    """
    if not is_host_path(dep):
        return []
    security = parts.container_security() | {"runAsUser": 0, "runAsGroup": SHARED_GROUP, "runAsNonRoot": False}
    return [
        {
            "name": "shared-memory",
            "image": config.image,
            "command": ["mmrouter", "shared-memory", SHARED_DIR, str(SHARED_GROUP)],
            "env": [],
            **parts.hardened(),
            "securityContext": security,
            "volumeMounts": [shared_mount()],
        }
    ]


def groups(dep: MMRouterDeployment) -> dict[str, Any]:
    return {"supplementalGroups": [SHARED_GROUP]} if is_host_path(dep) else {}


def is_host_path(dep: MMRouterDeployment) -> bool:
    """Whether the shared directory is a folder of the node, which only namespaces of level privileged allow."""
    return dep.spec.routing.shared_volume is None or "hostPath" in dep.spec.routing.shared_volume


def transfer_line(dep: MMRouterDeployment) -> str:
    """Return how images may reach engines, through what, and why, for `mmrouter plan`."""
    mode, routing = dep.spec.transfer, dep.spec.routing
    apart = [pool.name for pool in dep.spec.pools if not is_shared(pool)]
    if mode == "none":
        why = "routing.transfer is none"
        if routing.transfer != "none":
            whose = f"of {', '.join(apart)} is pod" if apart else "does not matter to this engine"
            why = f"routing.transfer is auto, and sharedMemory.scope {whose}"
        if dep.spec.frontend.mode == "endpointPicker":
            why = "a gateway sends them to the engines"
        return f"images: inside requests, because {why}"
    place = "no shared memory, because no pool has sharedMemory.scope node"
    if len(apart) < len(dep.spec.pools):
        place = f"the volume {next(iter(routing.shared_volume or {}), '')} of routing.sharedVolume"
        if routing.shared_volume is None:
            place = "a hostPath of the node (routing.sharedVolume is not set)"
        level = (
            "needs a namespace of level privileged" if is_host_path(dep) else "a namespace of level restricted allows"
        )
        place += f", which {level}"
    renders = any(pool.role == "renderer" for pool in dep.spec.pools)
    processed = "processed by renderers" if renders else "as files, because no pool is a renderer"
    if renders and routing.transfer in (None, "auto"):
        processed += " while that is measured to be faster"
    return f"images: {mode}, {processed}, through {place}"
