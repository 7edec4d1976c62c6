"""The ConfigMap of a deployment: the resource itself, as every process reads it."""

import hashlib
import json
from typing import Any

from mmrouter.api import MMRouterDeployment, Pool, to_json
from mmrouter_operator.render.common import config_name, object_metadata


def render_configmap(dep: MMRouterDeployment) -> dict[str, Any]:
    """Return the ConfigMap.

    Its name is fixed: the number of replicas is part of the resource, and a new name would restart every engine when it
    changes. What does need a restart is told by :func:`frontend_hash` and :func:`pool_hash`.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": object_metadata(dep, config_name(dep), "config"),
        "data": {"deployment.json": json.dumps(to_json(dep), indent=2, sort_keys=True) + "\n"},
    }


def frontend_hash(dep: MMRouterDeployment) -> str:
    """Return a hash of what a router reads once, when it starts."""
    spec = _spec(dep)
    for section in ("paused", "networkPolicy", "sidecar"):
        spec.pop(section, None)
    spec["frontend"] = {key: value for key, value in spec.get("frontend", {}).items() if key == "apiKeys"}
    kept = ("name", "role", "weight", "parallelism", "blockSize", "accelerator")
    spec["pools"] = [{key: pool[key] for key in kept if key in pool} for pool in spec["pools"]]
    return _hash(spec)


def pool_hash(dep: MMRouterDeployment, pool: Pool) -> str:
    """Return a hash of what a pool's sidecar reads once, when it starts."""
    spec = _spec(dep)
    kept = ("model", "engine", "verification", "sidecar", "observability")
    mine = next(item for item in spec["pools"] if item["name"] == pool.name)
    return _hash(
        {
            **{key: spec[key] for key in kept if key in spec},
            "pool": {
                key: mine[key] for key in ("name", "role", "parallelism", "blockSize", "accelerator") if key in mine
            },
        }
    )


def _spec(dep: MMRouterDeployment) -> dict[str, Any]:
    # Without defaults: writing a default out changes nothing, so it restarts nothing.
    spec: dict[str, Any] = dep.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return spec


def _hash(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
