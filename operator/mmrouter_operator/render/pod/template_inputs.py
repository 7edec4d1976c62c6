"""Hashes of what pods are made from: when a pod template is another one, and which engines may exchange KV blocks.

A pod template's hash is over the *inputs*: what the user said and the secrets, not what this release renders from it,
nor the operator's own configuration. So a new operator finds the hash unchanged and leaves running engines alone.
A change of what goes into a hash restarts every engine of every deployment once.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool, Role, block_size_of, quantity_bytes
from mmrouter_lib.engines.base.launch import chosen_flags, uses_plugin
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_operator.render.pod.shared_memory import frontends_share, is_shared, limit_bytes

Layout = dict[str, Any]

ROUTER_POOL_FIELDS: Final = ("name", "role", "parallelism", "blockSize", "accelerator")
"""What a router reads of a pool. The encoders' weights are not among it: to change one restarts nothing."""
ROUTER_ENGINE_FIELDS: Final = ("type", "blockSize", "chatTemplate", "processor")
SET_ROLES: Final[frozenset[Role]] = frozenset({"prefill", "decode"})
"""Roles whose pools exchange KV blocks, and therefore change together."""
SCALING_FIELDS: Final = ("replicas", "weight", "autoscaling")


def frontend_inputs(dep: MMRouterDeployment, secrets: str) -> str:
    """Return the hash of what the frontend's pods are made from; ``secrets`` is the Secret's fingerprint."""
    spec = _spec(dep)
    frontend = spec.get("frontend", {})
    return _hash(
        {
            **{key: spec[key] for key in ("model", "routing", "verification", "observability") if key in spec},
            "engine": _only(spec["engine"], ROUTER_ENGINE_FIELDS),
            "frontend": _only(frontend, ("apiKeys", "resources", "podTemplate")),
            "pools": [_only(pool, ROUTER_POOL_FIELDS) for pool in spec["pools"]],
            **({"shared": _shared(dep)} if frontends_share(dep) else {}),
            "secrets": secrets,
        }
    )


def pool_inputs(dep: MMRouterDeployment, pool: Pool, secrets: str) -> str:
    """Return the hash of what a pool's pods are made from; ``secrets`` is the Secret's fingerprint.

    Other pools count in four things: encoders, because engines are told how to take embeddings; partners in the
    exchange of KV blocks, because their pods carry one compatibility label; renderers, because engines then have our
    plugin; and the largest one that shares memory, because that is what all of them may fill.
    """
    spec = _spec(dep)
    mine = next(item for item in spec["pools"] if item["name"] == pool.name)
    mine = {key: value for key, value in mine.items() if key not in SCALING_FIELDS}
    mine["updates"] = _only(mine.get("updates", {}), ("drainSeconds",))
    return _hash(
        {
            **{key: spec[key] for key in ("model", "engine", "sidecar") if key in spec},
            "media": _only(spec.get("routing", {}).get("media", {}), ("maxImages",)),
            "pool": mine,
            "encoders": any(other.role == "encoder" for other in dep.spec.pools),
            "partners": compatibility(_said_layout(dep, partner) for partner in partners(dep, pool)),
            **_handover(dep, pool),
            "secrets": secrets,
        }
    )


def _shared(dep: MMRouterDeployment) -> dict[str, str]:
    """Return what a router must know of the node's directory: whose it is besides, and how large."""
    return {pool.name: pool.shared_memory.size for pool in dep.spec.pools if is_shared(pool)}


def _handover(dep: MMRouterDeployment, pool: Pool) -> dict[str, Any]:
    """Return what other sections say of how images reach a pool's engines; empty where they come inside requests.

    So a deployment without hand-overs has the hashes that it had before there were any.
    """
    found: dict[str, Any] = {}
    transfer = dep.spec.routing.transfer
    if transfer != "none" and (is_shared(pool) or uses_plugin(dep)):
        found["transfer"] = [transfer, "plugin" if uses_plugin(dep) else ""]
    if is_shared(pool) and (limit := limit_bytes(dep)) != quantity_bytes(pool.shared_memory.size):
        found["shared"] = limit
    return found


def compatibility(layouts: Iterable[Layout]) -> str:
    """Return a label value that stands for the layouts of engines which exchange KV blocks.

    Prefill and decode pools of a deployment have one value together: they may differ among each other in what the
    connector translates (tensor parallelism, for one), but a change on one side is a change for both.
    """
    return _hash({"layouts": sorted({json.dumps(layout, sort_keys=True) for layout in layouts})})


def partners(dep: MMRouterDeployment, pool: Pool) -> list[Pool]:
    """Return the pools with which a pool's engines exchange KV blocks, itself among them."""
    return [p for p in dep.spec.pools if p.role in SET_ROLES] if pool.role in SET_ROLES else [pool]


def kv_layout(dep: MMRouterDeployment, pool: Pool, image: str) -> Layout:
    """Return what decides what a pool's engines put into KV blocks, how they lay them out and name them on the wire.

    An engine takes the blocks of another one for those of its own prompt, unseen. So two that would make different
    prompts of one request, with an old and a new chat template, must never meet.
    """
    model, engine = dep.spec.model, dep.spec.engine
    prompt = _only(_spec(dep)["engine"], ("chatTemplate", "processor"))
    return {
        "model": [model.id, model.revision, model.volume],
        "engine": [engine.type, image],
        "blockSize": block_size_of(dep, pool),
        "tensor": pool.parallelism.tensor,
        "connector": engine.kv_connector,
        "flags": chosen_flags([*engine.args, *pool.args], LAUNCHERS[engine.type].kv_layout_flags),
        **({"prompt": prompt} if prompt and pool.role in SET_ROLES else {}),
    }


def _said_layout(dep: MMRouterDeployment, pool: Pool) -> Layout:
    # A default image is not the user's word: it may change with the operator's release.
    return kv_layout(dep, pool, pool.image or dep.spec.engine.image)


def _spec(dep: MMRouterDeployment) -> dict[str, Any]:
    # Without defaults: to write one out, as the API server does, changes nothing and restarts nothing.
    spec: dict[str, Any] = dep.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return spec


def _only(section: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: section[key] for key in keys if key in section}


def _hash(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
