"""The command line of ``sglang serve``: each flag that exactness, the wiring or a field of the resource depends on."""

import re
from collections.abc import Mapping
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool, block_size_of
from mmrouter_lib.engines.base.launch import (
    BOOTSTRAP_PORT,
    DEVICES,
    HTTP_PORT,
    SIXTEEN_BITS,
    EmbeddingTransfer,
    EngineLauncher,
    Launch,
    LaunchError,
    events_config,
    flag,
    model_flags,
    tls_flags,
)
from mmrouter_lib.engines.sglang.stage_requests import TRANSFER, urls
from mmrouter_lib.pod_paths import MODEL_DIR

API_KEY_ENV = "SGLANG_API_KEY"  # variable that the --api-key argument expands; the engine itself reads none

PREPROCESS_CACHE_MB = 256
"""Host memory for processed images in engines of Qwen-VL and PaddleOCR-VL. Any size above 0 makes an image's identity a
function of its encoded bytes, which the router predicts (docs/engine-facts/sglang.md#artifact-identity)."""

_KEEPS_IMAGES = re.compile(r"qwen(?:[\d.]*-?vl|3\.[56])|paddleocr-?vl", re.IGNORECASE)
"""Names of models whose images such a cache names by their bytes."""
_TEXT_BY_DEFAULT = re.compile(r"gemma[-_]?3(?![n\d])|medgemma|llama[-_]?(?:guard[-_])?4(?!bit)", re.IGNORECASE)
"""Names of models of which the engine refuses images without ``--enable-multimodal``. For a model that takes text alone
the flag has no effect."""
# Keys of engine.kvConnector and engine.ecConnector -> SGLang's flags.
KV_CONNECTOR_KEYS: Final = {
    "transferBackend": "--disaggregation-transfer-backend",
    "ibDevice": "--disaggregation-ib-device",
}
EC_CONNECTOR_KEYS: Final = {"transferBackend": "--encoder-transfer-backend"}
ASKS_ENCODERS: Final = frozenset({"worker", "prefill"})  # roles that send their images to encoders, where there are any


def launch(dep: MMRouterDeployment, pool: Pool) -> Launch:
    """Return the command line of a pool's engines. Raises ``LaunchError`` for a role or transfer that SGLang lacks."""
    if pool.role == "renderer":
        raise LaunchError("role", "SGLang has no renderer: it stands beside vLLM engines only")
    spec = dep.spec
    model, engine, encodes, asks = spec.model, spec.engine, pool.role == "encoder", asks_encoders(dep, pool)
    env = {"SGLANG_USE_CPU_ENGINE": "1"} if pool.accelerator.kind == "cpu" else {}
    if not encodes:
        # Without it the engine ignores the headers that join a pair's requests and that name a request to abort.
        env["SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES"] = "1"
    if asks:
        # The engine would check the health of the sidecar's URLs and drop those that fail.
        env["SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL"] = "0"
    args = [
        *flag("--model-path", MODEL_DIR if model.volume is not None else model.id),
        *flag("--served-model-name", model.served_name or dep.metadata.name),
        *flag("--host", "$(POD_IP)"),
        *flag("--port", HTTP_PORT),
        *tls_flags(dep),
        f"--api-key=$({API_KEY_ENV})",  # one argument: a key may begin with a dash
        *([] if encodes else _cache_flags(dep, pool)),
        "--enable-metrics",
        *([] if encodes else ["--enable-cache-report"]),
        *([] if encodes else flag("--limit-mm-data-per-request", {"image": spec.routing.media.max_images})),
    ]
    if (device := DEVICES[pool.accelerator.kind].sglang_device) is not None:
        args += flag("--device", device)
    args += model_flags(dep)
    processor = {"min_pixels": engine.processor.min_pixels, "max_pixels": engine.processor.max_pixels}
    if set_options := {name: value for name, value in processor.items() if value is not None}:
        args += flag("--mm-process-config", {"image": set_options})
    if _KEEPS_IMAGES.search(model.id) and not encodes and not asks:
        args += flag("--mm-preprocess-cache-size-mb", PREPROCESS_CACHE_MB)
    if _TEXT_BY_DEFAULT.search(model.id) and not encodes:
        args.append("--enable-multimodal")
    args += _role_flags(dep, pool)
    if pool.parallelism.tensor > 1:
        args += flag("--tensor-parallel-size", pool.parallelism.tensor)
    if pool.parallelism.data > 1:
        args += flag("--data-parallel-size", pool.parallelism.data)
    # The type is given so that the command does not look the model up to distinguish language from diffusion models.
    return Launch(
        command=["sglang", "serve", "--model-type", "llm"],
        args=[*args, *engine.args, *pool.args],
        env=env,
        # /health of a language engine generates a token, and with it a block
        # (docs/engine-facts/sglang.md#http-endpoints).
        health_path="/health" if encodes else "/ready",
        # An encoder has no cheap probe: its /health encodes an image, after the queued ones
        # (docs/engine-facts/sglang.md#encoder-disaggregation).
        health_seconds=30 if encodes else 5,
        ports={"bootstrap": BOOTSTRAP_PORT} if pool.role == "prefill" else {},
    )


def _cache_flags(dep: MMRouterDeployment, pool: Pool) -> list[str]:
    flags = flag("--page-size", block_size_of(dep, pool))
    # A decode engine keeps no prefix cache, so it has no events (docs/engine-facts/sglang.md#block-size-and-timing).
    return flags if pool.role == "decode" else [*flags, *flag("--kv-events-config", events_config())]


def asks_encoders(dep: MMRouterDeployment, pool: Pool) -> bool:
    """Whether the pool's engines send all their images to encoders."""
    return pool.role in ASKS_ENCODERS and any(other.role == "encoder" for other in dep.spec.pools)


def _encoding_flags(dep: MMRouterDeployment, pool: Pool) -> list[str]:
    """Encoders keep embeddings; language engines get the sidecar's URLs, which forwards images to encoders."""
    asks, connector = asks_encoders(dep, pool), dep.spec.engine.ec_connector
    if not asks and pool.role != "encoder":
        return []
    transfer = _chosen("engine.ecConnector", {"transferBackend": TRANSFER, **connector}, EC_CONNECTOR_KEYS)
    if transfer[1] != TRANSFER:
        raise LaunchError(
            "engine.ecConnector.transferBackend",
            f"must be {TRANSFER}: with any other an encoder that fails ends SGLang's language engines",
        )
    if not asks:
        return ["--encoder-only", "--enable-prefix-mm-cache", *transfer]
    return ["--language-only", *transfer, "--encoder-urls", *urls("$(POD_LOOPBACK)")]


def _embeddings(dep: MMRouterDeployment) -> EmbeddingTransfer | None:
    pools = tuple(p.name for p in dep.spec.pools if p.role == "encoder" or asks_encoders(dep, p))
    if all(pool.role != "encoder" for pool in dep.spec.pools):
        return None
    return EmbeddingTransfer(
        TRANSFER, "", pools, "sent over the network, the only way that a failed encoder cannot break"
    )


def _role_flags(dep: MMRouterDeployment, pool: Pool) -> list[str]:
    engine, encoding = dep.spec.engine, _encoding_flags(dep, pool)
    if pool.role not in ("prefill", "decode"):
        return encoding
    backend = DEVICES[pool.accelerator.kind].sglang_transfer
    connector = engine.kv_connector or ({"transferBackend": backend} if backend is not None else {})
    if "transferBackend" not in connector:
        raise LaunchError(
            "engine.kvConnector",
            f"pool {pool.name}: SGLang has no default transfer for {pool.accelerator.kind}: name a `transferBackend`",
        )
    return [
        *flag("--disaggregation-mode", pool.role),
        *_chosen("engine.kvConnector", connector, KV_CONNECTOR_KEYS),
        *flag("--disaggregation-bootstrap-port", BOOTSTRAP_PORT),
        *encoding,
    ]


def _chosen(path: str, connector: Mapping[str, Any], keys: Mapping[str, str]) -> list[str]:
    for key, value in connector.items():
        if key not in keys:
            raise LaunchError(f"{path}.{key}", f"SGLang accepts {' and '.join(f'`{k}`' for k in keys)} here")
        if not isinstance(value, str) or not value:
            raise LaunchError(f"{path}.{key}", f"is a text, not {value!r:.80}")
    return [part for key, value in connector.items() for part in flag(keys[key], value)]


SGLANG: Final = EngineLauncher(
    type="sglang",
    launch=launch,
    embeddings=_embeddings,
    api_key_env=API_KEY_ENV,
    kv_layout_flags=frozenset(
        {"--dtype", "--kv-cache-dtype", "--quantization", "--quantization-param-path", "--json-model-override-args"}
        | {"--pipeline-parallel-size", "--pp-size", "--attention-backend", "--prefill-attention-backend"}
    ),
    kv_exact_flags={
        "--dtype": SIXTEEN_BITS,
        "--kv-cache-dtype": SIXTEEN_BITS,
        "--json-model-override-args": frozenset(),
    },
    # A decode engine of 0.5.23 refuses a prefill engine with another page size or another cache format.
    kv_exact_block_size=True,
    memory_flag="--mem-fraction-static",
    memory_of_free=True,
)
