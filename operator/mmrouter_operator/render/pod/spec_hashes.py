"""Hashes of the inputs of pod templates.

A template's hash covers its *inputs*: the spec and the secrets, not the objects that this release renders from them,
nor the operator's configuration. So a new operator finds the hash unchanged and leaves running engines alone. A change
of what goes into a hash restarts every engine of every deployment once.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool, Role, block_size_of, quantity_bytes
from mmrouter_lib.engines import adapter, answering_args, storing_pools
from mmrouter_lib.engines.base.launch import chosen_flags, uses_plugin
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_operator.render.pod.shared_memory import frontends_share, is_shared, limit_bytes

Layout = dict[str, Any]

ROUTER_POOL_FIELDS: Final = ("name", "role", "parallelism", "blockSize")
"""Fields of a pool that a router reads at its start, with the accelerator's kind. It reads the encoders' weights while
it runs, so changing one restarts nothing."""
ROUTER_OBSERVABILITY_FIELDS: Final = ("otlpEndpoint", "debugHeaders")
ROUTER_ENGINE_FIELDS: Final = ("type", "blockSize", "chatTemplate", "processor", "tls", "kvConnector")
ROUTER_FRONTEND_FIELDS: Final = (
    "mode",
    "apiKeys",
    "tls",
    "pickerTls",
    "maxHeldBytes",
    "tenants",
    "resources",
    "podTemplate",
)
SET_ROLES: Final[frozenset[Role]] = frozenset({"prefill", "decode"})
"""Roles whose pools exchange KV blocks, and therefore change together."""
SCALING_FIELDS: Final = ("replicas", "weight", "autoscaling")


def frontend_inputs(dep: MMRouterDeployment, secrets: str, *, former: bool = False) -> str:
    """Return the hash of the inputs of the frontend's pods; ``secrets`` is the Secret's fingerprint.

    ``former``: as the previous version computes it, with the whole accelerator and `observability.podMonitor`.
    """
    spec = _spec(dep)
    observed = spec.get("observability", {})
    if not former:
        observed = _only(observed, ROUTER_OBSERVABILITY_FIELDS)
    shared = {pool.name: pool.shared_memory.size for pool in dep.spec.pools if is_shared(pool)}
    kept = {pool.name: LAUNCHERS[dep.spec.engine.type].embedding_cache_bytes(dep, pool) for pool in dep.spec.pools}
    return _hash(
        {
            **{key: spec[key] for key in ("model", "verification") if key in spec},
            **({"observability": observed} if observed else {}),
            **_routing(dep, spec),
            "engine": _only(spec["engine"], ROUTER_ENGINE_FIELDS),
            "frontend": _only(spec.get("frontend", {}), ROUTER_FRONTEND_FIELDS),
            "pools": [
                _only(pool, ROUTER_POOL_FIELDS)
                | {"accelerator": pool["accelerator"] if former else _only(pool["accelerator"], ("kind",))}
                for pool in spec["pools"]
            ],
            **({"shared": shared} if frontends_share(dep) else {}),
            **({"embeddings": kept} if any(kept.values()) else {}),
            **({"storing": sorted(storing)} if (storing := storing_pools(dep)) else {}),
            **_answers(dep),
            "secrets": secrets,
        }
    )


def _answers(dep: MMRouterDeployment) -> dict[str, Any]:
    """Return what the engines' arguments decide about their answers; empty if that is as without any argument."""
    args, traits = answering_args(dep), adapter(dep.spec.engine.type).answer_traits
    given = traits(args, {})
    return {} if given == traits([()] * len(args), {}) else {"answers": [*given]}


def _routing(dep: MMRouterDeployment, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `routing` without a ``transfer`` that hands nothing over, as in earlier releases, whose
    definitions wrote ``none`` into every resource."""
    routing = {key: value for key, value in spec.get("routing", {}).items() if key != "transfer"}
    if dep.spec.transfer != "none":
        routing["transfer"] = dep.spec.routing.transfer or "auto"
    return {"routing": routing} if routing else {}


def pool_inputs(dep: MMRouterDeployment, pool: Pool, secrets: str) -> str:
    """Return the hash of the inputs of a pool's pods; ``secrets`` is the Secret's fingerprint.

    It depends on other pools in five ways: on encoders, because engines then receive embeddings; on the kinds and the
    memory of all pools with a part in that, because they decide how embeddings travel; on partners in the exchange of
    KV blocks, because they share one compatibility label; on renderers, because engines then load our plugin; and on
    the largest pool that shares memory, because that is the limit of all of them.
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
            # A default image is not part of the spec: it may change with the operator's release.
            "partners": compatibility(kv_layout(dep, p, p.image or dep.spec.engine.image) for p in partners(dep, pool)),
            **_handover(dep, pool),
            **_embeddings(dep, pool),
            "secrets": secrets,
        }
    )


def _handover(dep: MMRouterDeployment, pool: Pool) -> dict[str, Any]:
    """Return the settings of how images reach a pool's engines; empty if they come inside requests.

    So deployments without hand-overs keep the hashes of releases that had none.
    """
    settings: dict[str, Any] = {}
    transfer = dep.spec.transfer
    if transfer != "none" and (is_shared(pool) or uses_plugin(dep)):
        settings["transfer"] = [transfer, "plugin" if uses_plugin(dep) else ""]
    if is_shared(pool) and (limit := limit_bytes(dep)) != quantity_bytes(pool.shared_memory.size):
        settings["shared"] = limit
    if is_shared(pool) and dep.spec.routing.shared_volume is not None:
        settings["volume"] = dep.spec.routing.shared_volume
    return settings


def _embeddings(dep: MMRouterDeployment, pool: Pool) -> dict[str, Any]:
    """Return the connector and the folder of a pool's embeddings; empty without files, as in earlier releases."""
    transfer = LAUNCHERS[dep.spec.engine.type].embeddings(dep)
    if transfer is None or not transfer.folder or pool.name not in transfer.pools:
        return {}
    return {"embeddings": [transfer.connector, transfer.folder]}


def compatibility(layouts: Iterable[Layout]) -> str:
    """Return the label value for the layouts of engines that exchange KV blocks.

    Prefill and decode pools of a deployment share one value: they may differ in what the connector translates (tensor
    parallelism, for example), but a change on one side is a change for both.
    """
    return _hash({"layouts": sorted({json.dumps(layout, sort_keys=True) for layout in layouts})})


def partners(dep: MMRouterDeployment, pool: Pool) -> list[Pool]:
    """Return the pools whose engines exchange KV blocks with those of ``pool``, itself included."""
    return [p for p in dep.spec.pools if p.role in SET_ROLES] if pool.role in SET_ROLES else [pool]


def kv_layout(dep: MMRouterDeployment, pool: Pool, image: str) -> Layout:
    """Return everything that determines the content, layout and wire names of a pool's KV blocks.

    An engine trusts that another engine's blocks belong to its own prompt. So two engines that would make different
    prompts of one request, with an old and a new chat template, must never be paired.
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


def _spec(dep: MMRouterDeployment) -> dict[str, Any]:
    # Without defaults: writing one out, as the API server does, must restart nothing.
    return dep.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _only(section: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: section[key] for key in keys if key in section}


def _hash(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
