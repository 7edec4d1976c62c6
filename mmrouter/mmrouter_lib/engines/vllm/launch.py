"""The command line of vLLM: each flag that exactness, the wiring or a field of the resource depends on.

Engines are ``vllm serve``; a renderer is ``vllm launch render``, which takes the same flags and needs only those that
change a prompt (docs/engine-facts/vllm.md#renderer). An encoder has no KV cache and no flags for one
(docs/engine-facts/vllm.md#encoder-disaggregation). Flags for transfers between engines are in
:mod:`mmrouter_lib.engines.vllm.connectors`.
"""

from typing import Final

from mmrouter_lib.api import MMRouterDeployment, Pool, block_size_of
from mmrouter_lib.api.pod_paths import CHAT_TEMPLATE_PATH, MODEL_DIR, SHARED_DIR
from mmrouter_lib.engines.base.launch import (
    HTTP_PORT,
    SIDE_CHANNEL_PORT,
    EngineLauncher,
    Launch,
    events_config,
    flag,
    plugin_command,
    uses_plugin,
)
from mmrouter_lib.engines.vllm.connectors import KV_EXACT_BLOCK_SIZE, KV_EXACT_FLAGS, SIDE_CHANNEL, transfer_flags

API_KEY_ENV = "VLLM_API_KEY"
"""Variable from which the engine reads the key that requests must carry."""

KV_LAYOUT_FLAGS: Final = frozenset(
    {"--dtype", "--kv-cache-dtype", "--quantization", "-q", "--calculate-kv-scales", "--hf-overrides"}
    | {"--pipeline-parallel-size", "-pp", "--attention-backend", "--mamba-cache-dtype"}
)
"""A user's flags that change what a KV block holds: engines that exchange blocks must agree on them."""


def launch(dep: MMRouterDeployment, pool: Pool) -> Launch:
    """Return the command line of one pool's engines.

    Raises ``LaunchError`` where engines of this role and accelerator have no transfer for their output.
    """
    spec = dep.spec
    model, engine = spec.model, spec.engine
    renders, caches = pool.role == "renderer", pool.role not in ("renderer", "encoder")
    transfer, transfer_env = transfer_flags(dep, pool)
    args = [
        MODEL_DIR if model.volume is not None else model.id,
        *flag("--served-model-name", model.served_name or dep.metadata.name),
        *flag("--host", "$(POD_IP)"),
        *flag("--port", HTTP_PORT),
    ]
    if caches:
        args += [
            *flag("--block-size", block_size_of(dep, pool)),
            "--enable-prefix-caching",
            *flag("--prefix-caching-hash-algo", "sha256_cbor"),
            *flag("--kv-events-config", {"enable_kv_cache_events": True, **events_config()}),
            "--enable-prompt-tokens-details",
        ]
    # At its start an encoder encodes the largest item of each modality that it accepts.
    others = {"video": 0, "audio": 0} if pool.role == "encoder" else {}
    args += flag("--limit-mm-per-prompt", {"image": spec.routing.media.max_images, **others})
    if not renders:
        args += flag("--shutdown-timeout", pool.updates.drain_seconds)
    if model.volume is None:
        args += flag("--revision", model.revision)
    if model.trust_remote_code:
        args.append("--trust-remote-code")
    if engine.chat_template is not None:
        args += flag("--chat-template", CHAT_TEMPLATE_PATH)
    processor = {
        "min_pixels": engine.processor.min_pixels,
        "max_pixels": engine.processor.max_pixels,
        "num_crops": engine.processor.num_crops,
    }
    if set_options := {name: value for name, value in processor.items() if value is not None}:
        args += flag("--mm-processor-kwargs", set_options)
    if spec.routing.transfer != "none" and pool.shared_memory.scope == "node":
        # Encoded images then come as files of this folder (docs/engine-facts/vllm.md#image-uuid).
        args += flag("--allowed-local-media-path", SHARED_DIR)
    args += transfer
    if not renders and pool.parallelism.tensor > 1:
        args += flag("--tensor-parallel-size", pool.parallelism.tensor)
    if not renders and pool.parallelism.data > 1:
        args += flag("--data-parallel-size", pool.parallelism.data)
    command = ["vllm", "launch", "render"] if renders else ["vllm", "serve"]
    return Launch(
        command=plugin_command(command) if uses_plugin(dep) else command,
        args=[*args, *engine.args, *pool.args],
        env=_environment() | transfer_env,
        health_path="/health",
        ports={SIDE_CHANNEL: SIDE_CHANNEL_PORT} if pool.role in ("encoder", "prefill", "decode") else {},
    )


def _environment() -> dict[str, str]:
    return {
        "VLLM_HOST_IP": "$(POD_IP)",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1",  # 9 bytes per hash on the wire instead of 34
        "VLLM_NO_USAGE_STATS": "1",  # no connection leaves the cluster
    }


VLLM: Final = EngineLauncher(
    type="vllm",
    launch=launch,
    api_key_env=API_KEY_ENV,
    kv_layout_flags=KV_LAYOUT_FLAGS,
    kv_exact_flags=KV_EXACT_FLAGS,
    kv_exact_block_size=KV_EXACT_BLOCK_SIZE,
)
