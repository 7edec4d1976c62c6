"""Connector flags for transfers of KV blocks and embeddings between vLLM engines, by role and accelerator.

``engine.kvConnector`` and ``engine.ecConnector`` replace the defaults. Both are the JSON of vLLM's own flags. The role
is filled in, because it differs between pools, and so is a ``kv_load_failure_policy`` that computes missing blocks:
vLLM 0.32 fails the request by default (docs/engine-facts/vllm.md#prefill-decode).
"""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool, quantity_bytes
from mmrouter_lib.engines.base.accelerator_settings import DEVICES
from mmrouter_lib.engines.base.launch import SIDE_CHANNEL_PORT, SIXTEEN_BITS, LaunchError, flag, uses_plugin

KV_EXACT_FLAGS: Final[dict[str, frozenset[str] | None]] = {
    "--dtype": SIXTEEN_BITS,
    "--kv-cache-dtype": SIXTEEN_BITS,
    "--attention-backend": None,
    "--hf-overrides": frozenset(),
}
"""Flags that engines which exchange KV blocks must agree on -> values that an engine may choose itself, ``None``: any.

They cover the inputs of vLLM's own check (``compute_nixl_compatibility_hash`` of 0.32) that flags set.
"""
KV_EXACT_BLOCK_SIZE: Final = False
"""Block sizes may differ: NixlConnector converts them, and tensor parallelism."""

RECOMPUTE: Final = "recompute"
SIDE_CHANNEL: Final = "side-channel"
"""Name of the port on which engines negotiate transfers."""


def transfer_flags(dep: MMRouterDeployment, pool: Pool) -> tuple[list[str], dict[str, str]]:
    """Return the flags and the environment of a pool's transfers; both empty for an engine that works alone.

    Raises ``LaunchError`` where there is no default and the resource names no connector.
    """
    args: list[str] = []
    env: dict[str, str] = {}
    if pool.role in ("prefill", "decode"):
        args += flag("--kv-transfer-config", _kv_connector(dep, pool))
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "$(POD_IP)", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT)}
    if uses_plugin(dep):
        env["MMROUTER_HANDOVER_WAYS"] = ",".join(_ways(dep, pool))
    nixl = pool.role in ("prefill", "decode") or (uses_plugin(dep) and dep.spec.routing.transfer == "nixl")
    if nixl and DEVICES[pool.accelerator.kind].kv_buffer == "cpu":
        # Without it UCX looks for the transport of an accelerator (docs/engine-facts/vllm.md#prefill-decode).
        env["UCX_TLS"] = "tcp,self,sm"
    encodes, generates = pool.role == "encoder", pool.role in ("worker", "prefill")
    if encodes or (generates and any(other.role == "encoder" for other in dep.spec.pools)):
        config, more = _ec_connector(dep, pool, "ec_producer" if encodes else "ec_consumer")
        args += flag("--ec-transfer-config", config)
        env |= more
    return args, env


def _ways(dep: MMRouterDeployment, pool: Pool) -> list[str]:
    """Return the ways in which the plugin transfers processed images, the fastest first."""
    ways = {"nixl": dep.spec.routing.transfer == "nixl", "shm": pool.shared_memory.scope == "node", "inline": True}
    return [way for way, available in ways.items() if available]


def _kv_connector(dep: MMRouterDeployment, pool: Pool) -> dict[str, Any]:
    chosen = dep.spec.engine.kv_connector
    if chosen:
        if not isinstance(chosen.get("kv_connector"), str):
            raise LaunchError("engine.kvConnector", "name vLLM's connector in `kv_connector`")
        return {"kv_role": "kv_both", "kv_load_failure_policy": RECOMPUTE, **chosen}
    buffer = DEVICES[pool.accelerator.kind].kv_buffer
    if buffer is None:
        raise LaunchError(
            "engine.kvConnector",
            f"pool {pool.name}: vLLM has no transfer of its own for {pool.accelerator.kind}: name a connector here",
        )
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": buffer,
        "kv_load_failure_policy": RECOMPUTE,
    }


def embedding_cache_bytes(dep: MMRouterDeployment, pool: Pool) -> int | None:
    """Return how many bytes of embeddings an encoder keeps for others, ``None`` where its connector sets no size."""
    try:
        config, _ = _ec_connector(dep, pool, "ec_producer")
    except LaunchError:
        return None
    extra = config.get("ec_connector_extra_config")
    size = extra.get("ec_cpu_bytes") if isinstance(extra, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def _ec_connector(dep: MMRouterDeployment, pool: Pool, role: str) -> tuple[dict[str, Any], dict[str, str]]:
    chosen = dep.spec.engine.ec_connector
    if chosen:
        if not isinstance(chosen.get("ec_connector"), str):
            raise LaunchError("engine.ecConnector", "name vLLM's connector in `ec_connector`")
        return {"ec_role": role, **chosen}, {}
    if not DEVICES[pool.accelerator.kind].vllm_embeddings:
        raise LaunchError(
            "engine.ecConnector",
            f"pool {pool.name}: vLLM hands embeddings over on no {pool.accelerator.kind} by itself: name a connector "
            "here, such as ECExampleConnector with a `shared_storage_path` on a volume that all pools mount",
        )
    if role == "ec_producer" and pool.parallelism.data > 1:
        raise LaunchError("parallelism.data", "an encoder hands over from one rank only: use replicas instead")
    # Embeddings use half of the pod's /dev/shm; the engine's own processes use the other half.
    extra = {"ec_cpu_bytes": quantity_bytes(pool.shared_memory.size) // 2, "ec_enable_nixl": True}
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if role == "ec_producer":
        env |= {"VLLM_EC_SIDE_CHANNEL_HOST": "$(POD_IP)", "VLLM_EC_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT)}
    return {"ec_connector": "ECCPUConnector", "ec_role": role, "ec_connector_extra_config": extra}, env
