from collections.abc import Callable
from typing import Any

import pytest

Build = Callable[..., dict[str, Any]]


@pytest.fixture
def document() -> Build:
    """The shortest useful resource, as decoded YAML, with spec sections replaced by keyword."""

    def build(**spec: Any) -> dict[str, Any]:
        pool = {"name": "worker", "role": "worker", "replicas": 2, "accelerator": {"kind": "nvidia"}}
        return {
            "apiVersion": "mmrouter.io/v1alpha1",
            "kind": "MMRouterDeployment",
            "metadata": {"name": "qwen-vl"},
            "spec": {
                "model": {"id": "Qwen/Qwen2.5-VL-3B-Instruct"},
                "engine": {"type": "vllm"},
                "pools": [pool],
                **spec,
            },
        }

    return build
