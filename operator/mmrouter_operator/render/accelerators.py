"""What a kind of accelerator means for a pod: data, no code per vendor."""

from dataclasses import dataclass, field

from mmrouter.api import DEFAULT_BLOCK_SIZE, AcceleratorKind


@dataclass(frozen=True, slots=True)
class AcceleratorRow:
    """One kind of device, as its device plugin and node labels name it."""

    block_size: int
    """Tokens per KV block by default."""
    resource: str | None = None
    """Extended resource, in limits; also the key of the taint that such nodes usually carry."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Label of nodes with such devices (vendor operators and Node Feature Discovery set it)."""
    affinity_mask: str | None = None
    """Variable that narrows a process to some of the devices it sees. Device plugins hand out only a pod's own devices,
    so pods do not set it; it is for processes that share a pod."""
    vllm_image: str = ""
    """Default engine image; empty where vLLM's project publishes none."""
    sglang_image: str = ""
    """Default engine image; empty where SGLang's project publishes none under a plain version."""


VLLM_VERSION = "v0.32.0"
SGLANG_VERSION = "v0.5.23"

ACCELERATORS: dict[AcceleratorKind, AcceleratorRow] = {
    "nvidia": AcceleratorRow(
        block_size=DEFAULT_BLOCK_SIZE["nvidia"],
        resource="nvidia.com/gpu",
        node_selector={"nvidia.com/gpu.present": "true"},
        affinity_mask="CUDA_VISIBLE_DEVICES",
        vllm_image=f"vllm/vllm-openai:{VLLM_VERSION}",
        sglang_image=f"lmsysorg/sglang:{SGLANG_VERSION}",
    ),
    "amd": AcceleratorRow(
        block_size=DEFAULT_BLOCK_SIZE["amd"],
        resource="amd.com/gpu",
        node_selector={"feature.node.kubernetes.io/amd-gpu": "true"},
        affinity_mask="HIP_VISIBLE_DEVICES",
        vllm_image=f"vllm/vllm-openai-rocm:{VLLM_VERSION}",
    ),
    "intel-i915": AcceleratorRow(
        block_size=DEFAULT_BLOCK_SIZE["intel-i915"],
        resource="gpu.intel.com/i915",
        node_selector={"intel.feature.node.kubernetes.io/gpu": "true"},
        affinity_mask="ZE_AFFINITY_MASK",
        vllm_image=f"vllm/vllm-openai-xpu:{VLLM_VERSION}",
    ),
    "intel-xe": AcceleratorRow(
        block_size=DEFAULT_BLOCK_SIZE["intel-xe"],
        resource="gpu.intel.com/xe",
        node_selector={"intel.feature.node.kubernetes.io/gpu": "true"},
        affinity_mask="ZE_AFFINITY_MASK",
        vllm_image=f"vllm/vllm-openai-xpu:{VLLM_VERSION}",
    ),
    "gaudi": AcceleratorRow(
        block_size=DEFAULT_BLOCK_SIZE["gaudi"],
        resource="habana.ai/gaudi",
        node_selector={"intel.feature.node.kubernetes.io/gaudi": "true"},
        affinity_mask="HABANA_VISIBLE_DEVICES",
    ),
    "cpu": AcceleratorRow(block_size=DEFAULT_BLOCK_SIZE["cpu"], vllm_image=f"vllm/vllm-openai-cpu:{VLLM_VERSION}"),
}
