"""The command line of vLLM: each flag that exactness, the wiring or a field of the resource depends on.

Engines are ``vllm serve``; a renderer is ``vllm launch render``, which takes the same flags and needs only those that
change a prompt (docs/engine-facts/vllm.md#renderer). An encoder has no KV cache and no flags for one
(docs/engine-facts/vllm.md#encoder-disaggregation).

``engine.kvConnector`` and ``engine.ecConnector`` replace the default connectors of transfers between engines. Both are
the JSON of vLLM's own flags. The role is filled in, because it differs between pools, and so is a
``kv_load_failure_policy`` that computes missing blocks: vLLM 0.32 fails the request by default
(docs/engine-facts/vllm.md#prefill-decode).
"""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool, block_size_of
from mmrouter_lib.engines.base.launch import (
    DEVICES,
    HTTP_PORT,
    SIDE_CHANNEL_PORT,
    SIXTEEN_BITS,
    EngineLauncher,
    Launch,
    LaunchError,
    events_config,
    flag,
    model_flags,
    tls_flags,
    uses_plugin,
)
from mmrouter_lib.engines.vllm.embedding_transfer import ec_connector, embedding_cache_bytes, embedding_transfer
from mmrouter_lib.pod_paths import MODEL_DIR, SHARED_DIR


def launch(dep: MMRouterDeployment, pool: Pool) -> Launch:
    """Return the command line of a pool's engines. Raises ``LaunchError`` without a transfer for their output."""
    spec = dep.spec
    model, engine = spec.model, spec.engine
    renders, caches = pool.role == "renderer", pool.role not in ("renderer", "encoder")
    transfer, transfer_env = transfer_flags(dep, pool)
    args = [
        MODEL_DIR if model.volume is not None else model.id,
        *flag("--served-model-name", model.served_name or dep.metadata.name),
        *flag("--host", "$(POD_IP)"),
        *flag("--port", HTTP_PORT),
        *tls_flags(dep),
    ]
    if caches:
        args += [
            *flag("--block-size", block_size_of(dep, pool)),
            "--enable-prefix-caching",
            *flag("--prefix-caching-hash-algo", "sha256_cbor"),
            *flag("--kv-events-config", {"enable_kv_cache_events": True, **events_config()}),
            "--enable-prompt-tokens-details",
            "--enable-scale-out",  # the tokens-in endpoint, by which streams are continued (docs/streams.md)
        ]
    # At its start an encoder encodes the largest item of each modality that it accepts.
    others = {"video": 0, "audio": 0} if pool.role == "encoder" else {}
    args += flag("--limit-mm-per-prompt", {"image": spec.routing.media.max_images, **others})
    if not renders:
        args += flag("--shutdown-timeout", pool.updates.drain_seconds)
    args += model_flags(dep)
    if set_options := engine.processor.model_dump(exclude_none=True):
        args += flag("--mm-processor-kwargs", set_options)
    if spec.transfer != "none" and pool.shared_memory.scope == "node":
        # Encoded images then come as files of this folder (docs/engine-facts/vllm.md#image-uuid).
        args += flag("--allowed-local-media-path", SHARED_DIR)
    args += transfer
    if not renders and pool.parallelism.tensor > 1:
        args += flag("--tensor-parallel-size", pool.parallelism.tensor)
    if not renders and pool.parallelism.data > 1:
        args += flag("--data-parallel-size", pool.parallelism.data)
    command = ["vllm", "launch", "render"] if renders else ["vllm", "serve"]
    return Launch(
        # The plugin's start script runs it with the plugins of its image and mmrouter's.
        command=["python3", "-m", "mmrouter_handover.plugin.start", *command] if uses_plugin(dep) else command,
        args=[*args, *engine.args, *pool.args],
        env={
            "VLLM_HOST_IP": "$(POD_IP)",
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1",  # 9 bytes per hash on the wire instead of 34
            "VLLM_NO_USAGE_STATS": "1",  # no connection leaves the cluster
            **({} if pool.accelerator.kind == "cpu" else {"VLLM_CPU_KVCACHE_SPACE": CPU_CACHE_GIB}),
            **transfer_env,
        },
        health_path="/health",
        ports={"side-channel": SIDE_CHANNEL_PORT} if pool.role in ("encoder", "prefill", "decode") else {},
    )


CPU_CACHE_GIB: Final = "4"
"""KV cache of an engine that is to have an accelerator and computes on the CPU: no other platform reads it, and the
engine's metrics then show it (docs/engine-facts/vllm.md#devices)."""
RECOMPUTE: Final = {"kv_load_failure_policy": "recompute"}


def transfer_flags(dep: MMRouterDeployment, pool: Pool) -> tuple[list[str], dict[str, str]]:
    """Return flags and environment of a pool's transfers. Raises ``LaunchError`` without any connector."""
    args: list[str] = []
    env: dict[str, str] = {}
    if pool.role in ("prefill", "decode"):
        args += flag("--kv-transfer-config", _kv_connector(dep, pool))
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "$(POD_IP)", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT)}
    images_by_nixl = dep.spec.transfer == "nixl"
    if uses_plugin(dep):
        ways = {"nixl": images_by_nixl, "shm": pool.shared_memory.scope == "node", "inline": True}  # the fastest first
        env["MMROUTER_HANDOVER_WAYS"] = ",".join(way for way, available in ways.items() if available)
    nixl = pool.role in ("prefill", "decode") or (uses_plugin(dep) and images_by_nixl)
    if nixl and DEVICES[pool.accelerator.kind].kv_buffer == "cpu":
        # Without it UCX looks for the transport of an accelerator (docs/engine-facts/vllm.md#prefill-decode).
        env["UCX_TLS"] = "tcp,self,sm"
    encodes, generates = pool.role == "encoder", pool.role in ("worker", "prefill")
    if encodes or (generates and any(other.role == "encoder" for other in dep.spec.pools)):
        config, more = ec_connector(dep, pool)
        args += flag("--ec-transfer-config", config)
        env |= more
    return args, env


def _kv_connector(dep: MMRouterDeployment, pool: Pool) -> dict[str, Any]:
    chosen = dep.spec.engine.kv_connector
    if chosen:
        if not isinstance(chosen.get("kv_connector"), str):
            raise LaunchError("engine.kvConnector", "name vLLM's connector in `kv_connector`")
        return {"kv_role": "kv_both", **RECOMPUTE, **chosen}
    buffer = DEVICES[pool.accelerator.kind].kv_buffer
    if buffer is None:
        raise LaunchError(
            "engine.kvConnector",
            f"pool {pool.name}: vLLM has no transfer of its own for {pool.accelerator.kind}: name a connector here",
        )
    return {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": buffer, **RECOMPUTE}


VLLM: Final = EngineLauncher(
    type="vllm",
    launch=launch,
    embeddings=embedding_transfer,
    embedding_cache_bytes=embedding_cache_bytes,
    api_key_env="VLLM_API_KEY",
    kv_layout_flags=frozenset(
        {"--dtype", "--kv-cache-dtype", "--quantization", "-q", "--calculate-kv-scales", "--hf-overrides"}
        | {"--pipeline-parallel-size", "-pp", "--attention-backend", "--mamba-cache-dtype"}
    ),
    # What flags set of the inputs of vLLM's own check (compute_nixl_compatibility_hash of 0.32).
    kv_exact_flags={
        "--dtype": SIXTEEN_BITS,
        "--kv-cache-dtype": SIXTEEN_BITS,
        "--attention-backend": None,
        "--hf-overrides": frozenset(),
    },
    kv_exact_block_size=False,  # NixlConnector converts block sizes, and tensor parallelism
    memory_flag="--gpu-memory-utilization",
    memory_of_free=False,
)
