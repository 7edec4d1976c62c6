"""Resources whose pools are real engines on a CPU, small enough for several of them on one machine."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from conformance.engine_process import (
    BLOCK_SIZE,
    EAGER,
    FORKED,
    KEPT,
    ONE_PROCESS,
    SGLANG_ENVIRONMENT,
    engine_args,
    sglang_args,
)

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
"""An encoder's connector on a CPU, where vLLM's other connectors do not run."""
SGLANG_IMAGE = "example.invalid/sglang:0.5.23"  # SGLang has no default image for CPUs; local processes need none
LOOPBACK_MEDIA = {"fetch": "public", "allowedCIDRs": ["127.0.0.0/8"]}


def pool(
    role: str, variables: Mapping[str, str] = MappingProxyType(ENVIRONMENT), *, replicas: int = 1, **more: Any
) -> dict[str, Any]:
    """Return a pool of CPU engines with an environment, named by its role."""
    return {
        "name": role,
        "role": role,
        "replicas": replicas,
        "accelerator": {"kind": "cpu"},
        "podTemplate": {"spec": {"containers": [{"name": "engine", "env": environment(variables)}]}},
        **more,
    }


def manifest(
    model_dir: Path,
    engine: Mapping[str, Any],
    pools: Iterable[Mapping[str, Any]],
    *,
    name: str = "demo",
    repository: str = REPOSITORY,
    frontends: int = 1,
    frontend: Mapping[str, Any] = MappingProxyType({}),
    routing: Mapping[str, Any] = MappingProxyType({"media": LOOPBACK_MEDIA}),
) -> dict[str, Any]:
    """Return an MMRouterDeployment. ``engine``, ``frontend`` and ``routing`` extend these sections of the spec."""
    return {
        "apiVersion": "mmrouter.io/v1alpha1",
        "kind": "MMRouterDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"id": repository, "volume": {"hostPath": {"path": str(model_dir)}}},
            "engine": {"blockSize": BLOCK_SIZE, **engine},
            "frontend": {"replicas": frontends, "service": {"port": 8000}, **frontend},
            "routing": dict(routing),
            "pools": [dict(each) for each in pools],
        },
    }


def sglang_manifest(
    model_dir: Path, repository: str, pools: Iterable[tuple[str, int]], *args: str, **more: Any
) -> dict[str, Any]:
    """Return the same for SGLang. ``pools``: role and replicas; ``args``: further flags; ``more``: ``spec.engine``."""
    engine = {"type": "sglang", "image": SGLANG_IMAGE, "args": [*sglang_args(), *args], **more}
    made = [pool(role, SGLANG_ENVIRONMENT, replicas=replicas) for role, replicas in pools]
    return manifest(model_dir, engine, made, repository=repository)


def resource(
    model_dir: Path,
    pools: Iterable[Mapping[str, Any]],
    *,
    args: Iterable[str] = (),
    frontend: Mapping[str, str] = MappingProxyType({}),
    **routing: Any,
) -> dict[str, Any]:
    """Return a vLLM deployment with hand-over and one frontend, which fetches images from this machine.

    ``args``: further engine flags. ``frontend``: the router's environment.
    """
    media = {"fetch": "allowList", "allowedHosts": ["127.0.0.1"], "allowedCIDRs": ["127.0.0.0/8"]}
    router = {"name": "router", "env": environment(frontend)}
    engine = {
        "type": "vllm",
        "processor": {"maxPixels": MAX_PIXELS},
        "ecConnector": FILES,
        "args": [*engine_args(), *args],
    }
    return manifest(
        model_dir,
        engine,
        [{"sharedMemory": {"scope": "node"}, **each} for each in pools],
        frontend={"podTemplate": {"spec": {"containers": [router]}}},
        routing={"media": media, **routing},
    )


def environment(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]
