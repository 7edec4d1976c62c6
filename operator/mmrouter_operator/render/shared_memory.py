"""Memory-backed files of an engine pod: its own /dev/shm, and with ``scope: node`` a directory that pods share.

The shared one is a folder on the node's tmpfs. It lies beside the pod's own /dev/shm, at a path of its own, because
engines put private segments into /dev/shm whose names meet if two pods see one folder.
"""

from typing import Any, Final

from mmrouter.api import MMRouterDeployment, Pool
from mmrouter_operator.config import OperatorConfig
from mmrouter_operator.render import common

SHARED_DIR: Final = "/var/lib/mmrouter/shared"
"""Where pods of scope node see their node's directory; environment MMROUTER_SHARED_DIR."""
SHARED_GROUP: Final = 65533
"""Group that owns the directory and what lies in it. ``fsGroup`` has no effect on a hostPath."""


def is_shared(pool: Pool) -> bool:
    """Whether the pool's pods use their node's directory."""
    return pool.shared_memory.scope == "node"


def volumes(dep: MMRouterDeployment, pool: Pool, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return the pod's volumes. Namespace and name are folders of their own: joined by a dash, two could be one."""
    own = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pool.shared_memory.size}}
    if not is_shared(pool):
        return [own]
    path = f"{config.shared_memory_root}/{dep.metadata.namespace}/{dep.metadata.name}"
    return [own, {"name": "shared", "hostPath": {"path": path, "type": "DirectoryOrCreate"}}]


def own_mount() -> dict[str, Any]:
    """Return the mount of the pod's own memory-backed files, the same in every container that has it."""
    return common.mount("shm", "/dev/shm")  # noqa: S108 - a path in the pod


def shared_mount(pool: Pool) -> list[dict[str, Any]]:
    """Return the mount of the node's directory."""
    return [common.mount("shared", SHARED_DIR)] if is_shared(pool) else []


def shared_env(pool: Pool) -> list[dict[str, Any]]:
    """Return the variable that names the node's directory."""
    return [common.value_env("MMROUTER_SHARED_DIR", SHARED_DIR)] if is_shared(pool) else []


def prepare(pool: Pool, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return the init container that opens the directory to the group; the kubelet makes it for root alone.

    It is root, and in the group, so that it needs no capability: an owner may hand a folder to a group of its own.
    """
    if not is_shared(pool):
        return []
    security = common.container_security() | {"runAsUser": 0, "runAsGroup": SHARED_GROUP, "runAsNonRoot": False}
    return [
        {
            "name": "shared-memory",
            "image": config.image,
            "command": ["mmrouter", "shared-memory", SHARED_DIR, str(SHARED_GROUP)],
            "env": [],
            "securityContext": security,
            "volumeMounts": shared_mount(pool),
        }
    ]


def groups(pool: Pool) -> dict[str, Any]:
    """Return what the pod's security context needs to use the directory."""
    return {"supplementalGroups": [SHARED_GROUP]} if is_shared(pool) else {}
