"""Resources whose pools are real vLLM engines on a CPU, small enough for several of them on one machine."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from conformance.engine_process import EAGER, FORKED, KEPT, ONE_PROCESS, engine_args

BLOCK = 32  # the CPU attention of vLLM takes multiples of 32 only
REPOSITORY = "Qwen/Qwen2-VL-2B-Instruct"
SHARED = "/var/lib/mmrouter/shared"
MAX_PIXELS = 200_704
"""An encoder measures its largest image when it starts: minutes on a CPU, unless images are small."""
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    **ONE_PROCESS,
    **FORKED,
    **KEPT,
    **EAGER,
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
FILES = {"ec_connector": "ECExampleConnector", "ec_connector_extra_config": {"shared_storage_path": SHARED}}
"""How an encoder hands its embeddings over on a CPU: vLLM's other connectors do not run there."""


def pool(role: str, **more: Any) -> dict[str, Any]:
    """Return a pool of one engine, named by its role."""
    return {
        "name": role,
        "role": role,
        "replicas": 1,
        "accelerator": {"kind": "cpu"},
        "sharedMemory": {"scope": "node"},
        "podTemplate": {"spec": {"containers": [{"name": "engine", "env": environment(ENVIRONMENT)}]}},
        **more,
    }


def resource(
    model_dir: Path,
    pools: Iterable[Mapping[str, Any]],
    *,
    args: Iterable[str] = (),
    frontend: Mapping[str, str] = MappingProxyType({}),
    **routing: Any,
) -> dict[str, Any]:
    """Return a deployment named demo with one frontend, which fetches images from this machine.

    ``args``: further engine flags. ``frontend``: the router's environment.
    """
    media = {"fetch": "allowList", "allowedHosts": ["127.0.0.1"], "allowedCIDRs": ["127.0.0.0/8"]}
    router = {"name": "router", "env": environment(frontend)}
    return {
        "apiVersion": "mmrouter.io/v1alpha1",
        "kind": "MMRouterDeployment",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"id": REPOSITORY, "volume": {"hostPath": {"path": str(model_dir)}}},
            "engine": {
                "type": "vllm",
                "blockSize": BLOCK,
                "processor": {"maxPixels": MAX_PIXELS},
                "ecConnector": FILES,
                "args": [*engine_args(), *args],
            },
            "frontend": {"replicas": 1, "service": {"port": 8000}, "podTemplate": {"spec": {"containers": [router]}}},
            "routing": {"media": media, **routing},
            "pools": [dict(each) for each in pools],
        },
    }


def environment(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]
