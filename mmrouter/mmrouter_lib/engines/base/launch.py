"""Command lines of engine containers, the ports of an engine pod, and helpers for flags (docs/architecture.md).

vLLM derives its device from its build, so :class:`Device` has no flag for it (docs/engine-facts/vllm.md#devices).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mmrouter_lib.api import EngineType, MMRouterDeployment, Pool
from typing import Final

from mmrouter_lib.pod_paths import CHAT_TEMPLATE_PATH, ENGINE_TLS_DIR

HTTP_PORT = 8000
EVENTS_PORT = 5557
REPLAY_PORT = 5657  # as EVENTS_PORT plus the data parallel rank, on the pod's loopback
SIDE_CHANNEL_PORT = 5600  # plus the data parallel rank: engines negotiate transfers of KV blocks and embeddings here
BOOTSTRAP_PORT = 8998  # the bootstrap server of an SGLang prefill engine, which answers its transfer addresses

SIXTEEN_BITS = frozenset({"float16", "bfloat16"})  # number formats that an engine chooses by itself without a flag


@dataclass(frozen=True, slots=True)
class Launch:
    """The engine container. Kubernetes or the local runner expands ``$(POD_IP)`` and ``$(POD_LOOPBACK)``."""

    command: list[str]
    args: list[str]
    env: dict[str, str]
    health_path: str
    ports: dict[str, int] = field(default_factory=dict)  # name -> port that other engines connect to, besides HTTP_PORT
    health_seconds: int = 5  # timeout of the health path


class EmbeddingTransfer(NamedTuple):
    """How embeddings get from encoders to the engines that compute prompts."""

    connector: str  # the engine's name for it
    folder: str  # where embeddings are files, else empty
    pools: tuple[str, ...]  # names of the pools with a part in it
    why: str  # what carries the embeddings and the reason for the choice, for `mmrouter plan`


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLauncher:
    """How one engine type is started, and which of its flags decide whether two engines can exchange KV blocks."""

    type: "EngineType"
    launch: "Callable[[MMRouterDeployment, Pool], Launch]"
    """Return the command line of one pool's engines. Raises :class:`LaunchError`."""
    embeddings: "Callable[[MMRouterDeployment], EmbeddingTransfer | None]"
    """Return how embeddings travel, ``None`` without encoders."""
    embedding_cache_bytes: "Callable[[MMRouterDeployment, Pool], int | None]" = lambda dep, pool: None
    """Return how many bytes of embeddings a pool's encoders keep for others, ``None`` where nothing sets a size."""
    api_key_env: str  # variable of the container that holds the key which requests must carry
    kv_layout_flags: frozenset[str]
    """User's flags that change what a KV block holds: engines that exchange blocks must agree on them."""
    kv_exact_flags: Mapping[str, frozenset[str] | None]
    """Flags that engines which exchange KV blocks must agree on -> values that an engine may choose by itself,
    ``None``: any."""
    kv_exact_block_size: bool  # whether engines which exchange KV blocks need the same block size
    memory_flag: str  # flag with the share of a device's memory that an engine takes
    memory_of_free: bool  # whether that is a share of the memory that is free at the engine's start, else of all


class LaunchError(ValueError):
    """An engine cannot be launched as the resource asks. ``path``: the field, from ``engine.`` or within the pool."""

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        super().__init__(message)


EVENTS_HWM = 10_000
"""Messages that an engine queues while its sidecar is away. They use the engine's memory: far below its own 100,000."""
REPLAY_STEPS = 10_000


def events_config() -> dict[str, Any]:
    """Return ``--kv-events-config``. A concrete host makes the publisher connect and the sidecar bind.

    See docs/engine-facts/vllm.md#event-sockets and docs/engine-facts/sglang.md#kv-event-flags.
    """
    return {
        "publisher": "zmq",
        "endpoint": f"tcp://$(POD_LOOPBACK):{EVENTS_PORT}",
        "replay_endpoint": f"tcp://$(POD_LOOPBACK):{REPLAY_PORT}",
        "buffer_steps": REPLAY_STEPS,
        "hwm": EVENTS_HWM,
    }


def tls_flags(dep: "MMRouterDeployment") -> list[str]:
    """Return the flags for TLS on the HTTP port, which all engine types have alike; empty without TLS.

    They do not name the CA: with it an engine would check the certificate of its requests to itself against its own
    address.
    """
    if dep.spec.engine.tls is None:
        return []
    pair = [*flag("--ssl-certfile", f"{ENGINE_TLS_DIR}/tls.crt"), *flag("--ssl-keyfile", f"{ENGINE_TLS_DIR}/tls.key")]
    return [*pair, "--enable-ssl-refresh"]


def model_flags(dep: "MMRouterDeployment") -> list[str]:
    """Return the flags of the model's revision, its code and its chat template, which all engine types have alike."""
    model, template = dep.spec.model, dep.spec.engine.chat_template
    return [
        *(flag("--revision", model.revision) if model.volume is None else []),
        *(["--trust-remote-code"] if model.trust_remote_code else []),
        *(flag("--chat-template", CHAT_TEMPLATE_PATH) if template is not None else []),
    ]


def uses_plugin(dep: "MMRouterDeployment") -> bool:
    """Whether the deployment's engines run the mmrouter plugin, which transfers processed images from renderers."""
    return dep.spec.transfer != "none" and any(pool.role == "renderer" for pool in dep.spec.pools)


def flag(name: str, value: object) -> list[str]:
    """Return a flag and its value as arguments; a mapping becomes JSON."""
    return [name, json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)]


def chosen_flags(args: Iterable[str], names: Set[str]) -> dict[str, str]:
    """Return the values of the flags in ``names`` among a user's arguments; the last wins, a bare flag is ``""``."""
    return {name: value for name, value in _pairs(list(args)) if name in names}


def _pairs(args: list[str]) -> Iterator[tuple[str, str]]:
    for number, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if not name.startswith("-"):
            continue
        following = args[number + 1] if number + 1 < len(args) else "-"
        yield name.replace("_", "-"), value if equals else ("" if following.startswith("-") else following)


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of accelerator, in the engines' terms. ``None``: the engine has no such setting there."""

    torch: str  # PyTorch's type of the device, as engines report it
    sglang_device: str | None = None  # --device of SGLang, which detects CUDA and ROCm itself
    kv_buffer: str | None = None  # kv_buffer_device of vLLM's NixlConnector: memory that KV blocks are transferred from
    vllm_embeddings: bool = False
    """Whether vLLM's ECCPUConnector runs there: it needs the second model runner, which needs Triton."""
    sglang_transfer: str | None = None  # --disaggregation-transfer-backend of SGLang by default
    encoder_speed: float = 1.0
    """Assumed speed of image encoding relative to a CPU, until an encoder's first image is measured. 8 for CUDA is the
    usual default of encoder schedulers; 3 for XPU and Gaudi is not measured."""


DEVICES: Final[dict[str, Device]] = {
    "nvidia": Device("cuda", kv_buffer="cuda", vllm_embeddings=True, sglang_transfer="nixl", encoder_speed=8.0),
    # ROCm builds of PyTorch and vLLM's table of NIXL devices call the device cuda.
    "amd": Device("cuda", kv_buffer="cuda", vllm_embeddings=True, sglang_transfer="nixl", encoder_speed=8.0),
    "intel-i915": Device("xpu", sglang_device="xpu", kv_buffer="xpu", vllm_embeddings=True, encoder_speed=3.0),
    "intel-xe": Device("xpu", sglang_device="xpu", kv_buffer="xpu", vllm_embeddings=True, encoder_speed=3.0),
    "gaudi": Device("hpu", sglang_device="hpu", encoder_speed=3.0),
    "cpu": Device("cpu", sglang_device="cpu", kv_buffer="cpu"),
}
