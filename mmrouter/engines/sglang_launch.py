"""The command line of ``sglang serve``: each flag that exactness, the wiring or a field of the resource depends on."""

import re
from typing import TYPE_CHECKING, Any, Final

from mmrouter.engines.launching import EVENTS_PORT, HTTP_PORT, REPLAY_PORT, Launch, flag

if TYPE_CHECKING:
    from mmrouter.api import MMRouterDeployment, Pool

API_KEY_ENV = "SGLANG_API_KEY"
"""Variable of the container from which the ``--api-key`` argument is filled; the engine itself reads none."""

EVENTS_HWM = 10_000
"""Messages that an engine keeps while its sidecar is away. They are the engine's memory: far below SGLang's 100,000."""
REPLAY_STEPS = 10_000

PREPROCESS_CACHE_MB = 256
"""Host memory that Qwen-VL engines keep processed images in. Any size above 0 makes an image's identity a function of
its encoded bytes, which the router predicts (facts on SGLang 2.5)."""

OWNED_FLAGS: Final[dict[str, str]] = {
    "--model-path": "model.id",
    "--model": "model.id",
    "--model-type": "",
    "--revision": "model.revision",
    "--tokenizer-path": "",
    "--tokenizer-mode": "",
    "--tokenizer-worker-num": "",  # several have no API key
    "--skip-tokenizer-init": "",
    "--served-model-name": "model.servedName",
    "--trust-remote-code": "model.trustRemoteCode",
    "--config": "engine.args",
    "--host": "",
    "--port": "",
    "--fastapi-root-path": "",
    "--ssl-keyfile": "",
    "--ssl-certfile": "",
    "--api-key": "",
    "--admin-api-key": "",
    "--grpc-mode": "",
    "--smg-grpc-mode": "",
    "--page-size": "engine.blockSize",
    "--disable-radix-cache": "",
    "--enable-session-radix-cache": "",
    "--kv-events-config": "",
    "--enable-metrics": "",
    "--enable-cache-report": "",
    "--chat-template": "engine.chatTemplate",
    "--hf-chat-template-name": "engine.chatTemplate",
    "--trust-request-chat-template": "",
    "--default-chat-template-kwargs": "",
    "--allow-auto-truncate": "",
    "--mm-process-config": "engine.processor",
    "--trust-mm-content-hashes": "",
    "--limit-mm-data-per-request": "routing.media.maxImages",
    "--encoder-only": "pools[].role",
    "--language-only": "pools[].role",
    "--language-model-only": "",
    "--disaggregation-mode": "pools[].role",
    "--tensor-parallel-size": "pools[].parallelism.tensor",
    "--tp-size": "pools[].parallelism.tensor",
    "--tp": "pools[].parallelism.tensor",
    "--data-parallel-size": "pools[].parallelism.data",
    "--dp-size": "pools[].parallelism.data",
    "--dp": "pools[].parallelism.data",
    "--decode-context-parallel-size": "",  # multiplies the block size
    "--dcp-size": "",
}
"""Flags refused in ``engine.args`` and ``pools[].args`` -> the field to use instead, empty where there is none.

``--mm-preprocess-cache-size-mb`` stays the user's: it may be larger, or set for a model whose name does not tell that
it is a Qwen-VL, and the sidecar reads from the engine what it is.
"""

_QWEN_VL = re.compile(r"qwen[\d.]*-?vl", re.IGNORECASE)
_DEVICES = {"intel-i915": "xpu", "intel-xe": "xpu", "gaudi": "hpu", "cpu": "cpu"}
"""Kind of accelerator -> ``--device``; the engine finds the others itself."""


def launch(dep: "MMRouterDeployment", pool: "Pool") -> Launch:
    """Return the command line of one worker pool's engines.

    Raises ``ValueError`` for a role whose transfer between engines this adapter cannot configure.
    """
    # The models import the adapters' flag tables, so the arrow back is taken at call time.
    from mmrouter.api import block_size_of  # noqa: PLC0415
    from mmrouter.api.paths import CHAT_TEMPLATE_PATH, MODEL_DIR  # noqa: PLC0415

    if pool.role != "worker":
        raise ValueError(f"pool {pool.name!r}: SGLang engines of role {pool.role!r} cannot be launched, only worker")
    spec = dep.spec
    model, engine = spec.model, spec.engine
    own = [*engine.args, *pool.args]
    args = [
        *flag("--model-path", MODEL_DIR if model.volume is not None else model.id),
        *flag("--served-model-name", model.served_name or dep.metadata.name),
        *flag("--host", "$(POD_IP)"),
        *flag("--port", HTTP_PORT),
        f"--api-key=$({API_KEY_ENV})",  # one argument: a key may begin with a dash
        *flag("--page-size", block_size_of(dep, pool)),
        *flag("--kv-events-config", _events_config()),
        "--enable-metrics",
        "--enable-cache-report",
        *flag("--limit-mm-data-per-request", {"image": spec.routing.media.max_images}),
    ]
    if pool.accelerator.kind in _DEVICES:
        args += flag("--device", _DEVICES[pool.accelerator.kind])
    if model.volume is None:
        args += flag("--revision", model.revision)
    if model.trust_remote_code:
        args.append("--trust-remote-code")
    if engine.chat_template is not None:
        args += flag("--chat-template", CHAT_TEMPLATE_PATH)
    processor = {"min_pixels": engine.processor.min_pixels, "max_pixels": engine.processor.max_pixels}
    if set_options := {name: value for name, value in processor.items() if value is not None}:
        args += flag("--mm-process-config", {"image": set_options})
    if _QWEN_VL.search(model.id):
        args += flag("--mm-preprocess-cache-size-mb", PREPROCESS_CACHE_MB)
    if pool.parallelism.tensor > 1:
        args += flag("--tensor-parallel-size", pool.parallelism.tensor)
    if pool.parallelism.data > 1:
        args += flag("--data-parallel-size", pool.parallelism.data)
    # The type is said, so that the command does not look the model up to tell language from diffusion models.
    return Launch(
        command=["sglang", "serve", "--model-type", "llm"],
        args=[*args, *own],
        env=_environment(pool),
        health_path="/ready",  # /health generates a token, and with it a block (facts on SGLang 6)
    )


def _events_config() -> dict[str, Any]:
    """A concrete host makes the publisher connect, so the sidecar, which starts first, binds (facts on SGLang 1.1)."""
    return {
        "publisher": "zmq",
        "endpoint": f"tcp://$(POD_LOOPBACK):{EVENTS_PORT}",
        "replay_endpoint": f"tcp://$(POD_LOOPBACK):{REPLAY_PORT}",
        "buffer_steps": REPLAY_STEPS,
        "hwm": EVENTS_HWM,
    }


def _environment(pool: "Pool") -> dict[str, str]:
    return {"SGLANG_USE_CPU_ENGINE": "1"} if pool.accelerator.kind == "cpu" else {}
