"""The command line of vLLM: each flag that exactness, the wiring or a field of the resource depends on.

Engines are ``vllm serve``; a renderer is ``vllm launch render``, which takes the same flags and needs those that change
a prompt, no others (docs/engine-facts/vllm.md#renderer). An encoder has no KV cache, so nothing about one is said to
it (docs/engine-facts/vllm.md#encoder-disaggregation).
How engines hand tensors to each other stands in :mod:`mmrouter_lib.engines.vllm.connectors`.
"""

from typing import TYPE_CHECKING, Any, Final

from mmrouter_lib.engines.base.launch import (
    EVENTS_PORT,
    HTTP_PORT,
    REPLAY_PORT,
    SIDE_CHANNEL_PORT,
    Launch,
    flag,
    plugin_command,
    takes_plugin,
)
from mmrouter_lib.engines.vllm.connectors import SIDE_CHANNEL, transfer_flags

if TYPE_CHECKING:
    from mmrouter_lib.api import MMRouterDeployment, Pool

API_KEY_ENV = "VLLM_API_KEY"
"""Variable from which the engine reads the key that requests must carry."""

EVENTS_HWM = 10_000
"""Messages that an engine keeps while its sidecar is away. They are the engine's memory: far below vLLM's 100,000."""
REPLAY_STEPS = 10_000

OWNED_FLAGS: Final[dict[str, str]] = {
    "--model": "model.id",
    "--revision": "model.revision",
    "--tokenizer": "",
    "--tokenizer-mode": "",
    "--tokenizer-revision": "model.revision",
    "--skip-tokenizer-init": "",
    "--served-model-name": "model.servedName",
    "--trust-remote-code": "model.trustRemoteCode",
    "--hf-token": "model.tokenSecret",
    "--config": "engine.args",
    "--host": "",
    "--port": "",
    "--uds": "",
    "--root-path": "",
    "--ssl-keyfile": "",
    "--ssl-certfile": "",
    "--api-key": "",
    "--headless": "",
    "--grpc": "",
    "--block-size": "engine.blockSize",
    "--enable-prefix-caching": "",
    "--prefix-caching-hash-algo": "",
    "--kv-events-config": "",
    "--enable-prompt-tokens-details": "",
    "--chat-template": "engine.chatTemplate",
    "--chat-template-content-format": "",
    "--trust-request-chat-template": "",
    "--default-chat-template-kwargs": "",
    "--interleave-mm-strings": "",
    "--exclude-tools-when-tool-choice-none": "",
    "--mm-processor-kwargs": "engine.processor",
    "--media-io-kwargs": "",
    "--enable-tower-connector-lora": "",
    "--enable-prompt-embeds": "",
    "--enable-mm-embeds": "",
    "--limit-mm-per-prompt": "routing.media.maxImages",
    "--allowed-local-media-path": "routing.transfer",
    "--mm-encoder-only": "pools[].role",
    "--kv-transfer-config": "engine.kvConnector",
    "--ec-transfer-config": "engine.ecConnector",
    "--shutdown-timeout": "pools[].updates.drainSeconds",
    "--tensor-parallel-size": "pools[].parallelism.tensor",
    "-tp": "pools[].parallelism.tensor",
    "--data-parallel-size": "pools[].parallelism.data",
    "-dp": "pools[].parallelism.data",
    "--data-parallel-rank": "",
    "-dpn": "",
    "--data-parallel-start-rank": "",
    "-dpr": "",
    "--data-parallel-size-local": "",
    "-dpl": "",
    "--data-parallel-hybrid-lb": "",
    "-dph": "",
    "--data-parallel-external-lb": "",
    "-dpe": "",
    "--data-parallel-multi-port-external-lb": "",
    "-dpm": "",
}
"""Flags refused in ``engine.args`` and ``pools[].args`` -> the field to use instead, empty where there is none.

vLLM takes them with underscores, with ``=``, with a dotted suffix (``--kv-events-config.endpoint``), negated
(``--no-``) and shortened; all of these are the same flag.
"""

KV_LAYOUT_FLAGS: Final = frozenset(
    {"--dtype", "--kv-cache-dtype", "--quantization", "-q", "--calculate-kv-scales", "--hf-overrides"}
    | {"--pipeline-parallel-size", "-pp", "--attention-backend", "--mamba-cache-dtype"}
)
"""A user's flags that change what a KV block holds: engines that exchange blocks must agree on them."""


def launch(dep: "MMRouterDeployment", pool: "Pool") -> Launch:
    """Return the command line of one pool's engines.

    Raises ``LaunchError`` where engines of this role and accelerator have no way to hand over what they make.
    """
    # The models import the adapters' flag tables, so the arrow back is taken at call time.
    from mmrouter_lib.api import block_size_of  # noqa: PLC0415
    from mmrouter_lib.api.paths import CHAT_TEMPLATE_PATH, MODEL_DIR, SHARED_DIR  # noqa: PLC0415

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
            *flag("--kv-events-config", _events_config()),
            "--enable-prompt-tokens-details",
        ]
    # An encoder gets images only, and at its start encodes the largest item of each kind that it may get.
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
        command=plugin_command(command) if takes_plugin(dep) else command,
        args=[*args, *engine.args, *pool.args],
        env=_environment() | transfer_env,
        health_path="/health",
        ports={SIDE_CHANNEL: SIDE_CHANNEL_PORT} if pool.role in ("encoder", "prefill", "decode") else {},
    )


def _events_config() -> dict[str, Any]:
    """A concrete host makes the publisher connect, so the sidecar, which starts first, binds.

    See docs/engine-facts/vllm.md#event-sockets.
    """
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://$(POD_LOOPBACK):{EVENTS_PORT}",
        "replay_endpoint": f"tcp://$(POD_LOOPBACK):{REPLAY_PORT}",
        "buffer_steps": REPLAY_STEPS,
        "hwm": EVENTS_HWM,
    }


def _environment() -> dict[str, str]:
    return {
        "VLLM_HOST_IP": "$(POD_IP)",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1",  # 9 bytes on the wire for each hash instead of 34
        "VLLM_NO_USAGE_STATS": "1",  # engines need no way out of the cluster
    }
