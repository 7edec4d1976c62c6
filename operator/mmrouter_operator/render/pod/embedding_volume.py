"""The volume for embeddings, in pods that exchange them as files: named in the resource, or claimed by the operator."""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool, quantity_bytes
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_lib.pod_paths import EMBEDDINGS_DIR
from mmrouter_operator.render.pod import parts

CLAIMED: Final = "64Gi"
"""Size of the claim: an image of 1,300 tokens takes about 9 MB in a model of width 3,584, and unused files are removed
after an hour. A claim can hardly shrink, so no field changes it."""
_NAME: Final = "embeddings"


def is_used(dep: MMRouterDeployment, pool: Pool) -> bool:
    transfer = LAUNCHERS[dep.spec.engine.type].embeddings(dep)
    return transfer is not None and transfer.folder == EMBEDDINGS_DIR and pool.name in transfer.pools


def is_claimed(dep: MMRouterDeployment) -> bool:
    """Whether the operator claims the volume."""
    return dep.spec.engine.embedding_volume is None and any(is_used(dep, pool) for pool in dep.spec.pools)


def claim_name(dep: MMRouterDeployment) -> str:
    return f"{dep.metadata.name}-embeddings"


def volume(dep: MMRouterDeployment) -> dict[str, Any]:
    """Return the pod's volume. Raises ``SpecError`` for a malformed source."""
    source = dep.spec.engine.embedding_volume
    if source is None:
        return {"name": _NAME, "persistentVolumeClaim": {"claimName": claim_name(dep)}}
    return parts.named_volume(_NAME, source, "spec.engine.embeddingVolume")


def mount() -> dict[str, Any]:
    return parts.mount(_NAME, EMBEDDINGS_DIR)


def cleaner_env(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return the variables of a sidecar that removes unused files. With limit 0 only the file system bounds them."""
    return [
        parts.value_env("MMROUTER_EMBEDDINGS_DIR", EMBEDDINGS_DIR),
        parts.value_env("MMROUTER_EMBEDDINGS_LIMIT_BYTES", str(quantity_bytes(CLAIMED) if is_claimed(dep) else 0)),
    ]
