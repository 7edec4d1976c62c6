"""What an engine must be told of the accelerator it runs on: data, keyed by ``pools[].accelerator.kind``.

vLLM finds its device by its build, so it has no flag here (facts on vLLM 10).
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of accelerator, as the engines name it. ``None``: the engine has no such thing there."""

    sglang_device: str | None = None
    """``--device`` of SGLang; it finds CUDA and ROCm itself."""
    kv_buffer: str | None = None
    """``kv_buffer_device`` of vLLM's NixlConnector: where KV blocks lie while they travel."""
    vllm_embeddings: bool = False
    """Whether vLLM's ECCPUConnector runs there: it needs the second model runner, which needs Triton."""
    sglang_transfer: str | None = None
    """``--disaggregation-transfer-backend`` of SGLang by default."""


DEVICES: Final[dict[str, Device]] = {
    "nvidia": Device(kv_buffer="cuda", vllm_embeddings=True, sglang_transfer="nixl"),
    # ROCm builds of PyTorch call their device cuda, and so does vLLM's table of NIXL devices.
    "amd": Device(kv_buffer="cuda", vllm_embeddings=True, sglang_transfer="nixl"),
    "intel-i915": Device(sglang_device="xpu", kv_buffer="xpu", vllm_embeddings=True),
    "intel-xe": Device(sglang_device="xpu", kv_buffer="xpu", vllm_embeddings=True),
    "gaudi": Device(sglang_device="hpu"),
    "cpu": Device(sglang_device="cpu", kv_buffer="cpu"),
}
