"""Engine settings per kind of accelerator (``pools[].accelerator.kind``): device flags, KV buffers, transfers.

vLLM derives its device from its build, so it has no flag here (docs/engine-facts/vllm.md#devices).
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of accelerator, in the engines' terms. ``None``: the engine has no such setting there."""

    sglang_device: str | None = None
    """``--device`` of SGLang, which detects CUDA and ROCm itself."""
    kv_buffer: str | None = None
    """``kv_buffer_device`` of vLLM's NixlConnector: memory that KV blocks are transferred from."""
    vllm_embeddings: bool = False
    """Whether vLLM's ECCPUConnector runs there: it needs the second model runner, which needs Triton."""
    sglang_transfer: str | None = None
    """``--disaggregation-transfer-backend`` of SGLang by default."""
    encoder_speed: float = 1.0
    """Assumed speed of image encoding relative to a CPU, until an encoder's first image is measured. 8 for CUDA is the
    usual default of encoder schedulers; 3 for XPU and Gaudi is not measured."""


DEVICES: Final[dict[str, Device]] = {
    "nvidia": Device(kv_buffer="cuda", vllm_embeddings=True, sglang_transfer="nixl", encoder_speed=8.0),
    # ROCm builds of PyTorch and vLLM's table of NIXL devices call the device cuda.
    "amd": Device(kv_buffer="cuda", vllm_embeddings=True, sglang_transfer="nixl", encoder_speed=8.0),
    "intel-i915": Device(sglang_device="xpu", kv_buffer="xpu", vllm_embeddings=True, encoder_speed=3.0),
    "intel-xe": Device(sglang_device="xpu", kv_buffer="xpu", vllm_embeddings=True, encoder_speed=3.0),
    "gaudi": Device(sglang_device="hpu", encoder_speed=3.0),
    "cpu": Device(sglang_device="cpu", kv_buffer="cpu"),
}
