"""What a kind of accelerator means for a pod: data, no code per vendor.

The engines' own settings for it are :data:`mmrouter_lib.engines.base.launch.DEVICES`, a column of this
table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from mmrouter_lib.api import AcceleratorKind
from mmrouter_lib.engines.base.launch import DEVICES, Device

NodeLabel = tuple[str, str | None]
"""A label of a node and its value; ``None``: any value."""


@dataclass(frozen=True, slots=True)
class AcceleratorRow:
    """One kind of device, as its device plugin and node labels name it."""

    engine: Device
    """Engine settings: device flag, and where KV blocks are kept during a transfer."""
    resource: str | None = None
    """Extended resource, in limits; also the key of the taint that such nodes usually carry. A pool's ``resourceName``
    (a MIG profile, for one) or ``claims`` (DRA) stand in its place."""
    node_labels: tuple[NodeLabel, ...] = ()
    """Labels of nodes with such devices, any one of which is enough: a device plugin labels nothing itself, and which
    discovery runs beside it differs from cluster to cluster."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What every engine on it needs in its environment."""
    visible_variable: str = ""
    """Variable that restricts a process to some devices, and numbers them."""
    device_files: str = ""
    """Pattern below / of files, one per device that this machine shows."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Default engine image by engine type, where the engine's project publishes one under a plain version."""
    startup_seconds: int = 3600
    """How long an engine may take until it answers: weights come from a network, kernels are compiled."""


_VLLM: Final = "v0.32.0"
ENGINE_VERSIONS: Final[Mapping[str, str]] = {"vllm": _VLLM, "sglang": "v0.5.23"}

_YES: Final = "true"
_INTEL_GPU_LABELS: Final[tuple[NodeLabel, ...]] = (
    ("intel.feature.node.kubernetes.io/gpu", _YES),  # Intel's rules for Node Feature Discovery
    ("feature.node.kubernetes.io/pci-0300_8086.present", _YES),  # Node Feature Discovery alone: display controller
    ("feature.node.kubernetes.io/pci-0380_8086.present", _YES),
)


def _intel(kind: AcceleratorKind, resource: str) -> AcceleratorRow:
    images = {"vllm": f"vllm/vllm-openai-xpu:{_VLLM}"}
    return AcceleratorRow(
        DEVICES[kind],
        resource,
        _INTEL_GPU_LABELS,
        visible_variable="ZE_AFFINITY_MASK",
        device_files=f"sys/bus/pci/drivers/{kind.removeprefix('intel-')}/[0-9]*",
        images=images,
        startup_seconds=5400,
    )


ACCELERATORS: Final[Mapping[AcceleratorKind, AcceleratorRow]] = {
    "nvidia": AcceleratorRow(
        engine=DEVICES["nvidia"],
        resource="nvidia.com/gpu",
        node_labels=(
            ("nvidia.com/gpu.present", _YES),  # GPU Feature Discovery, and by hand
            ("feature.node.kubernetes.io/pci-10de.present", _YES),  # Node Feature Discovery as NVIDIA configures it
            ("feature.node.kubernetes.io/pci-0300_10de.present", _YES),  # ... as it comes: display, 3D controller
            ("feature.node.kubernetes.io/pci-0302_10de.present", _YES),
            ("cloud.google.com/gke-accelerator", None),
        ),
        visible_variable="CUDA_VISIBLE_DEVICES",
        device_files="dev/nvidia[0-9]*",
        images={"vllm": f"vllm/vllm-openai:{_VLLM}", "sglang": f"lmsysorg/sglang:{ENGINE_VERSIONS['sglang']}"},
    ),
    "amd": AcceleratorRow(
        engine=DEVICES["amd"],
        resource="amd.com/gpu",
        node_labels=(
            ("feature.node.kubernetes.io/amd-gpu", _YES),  # the rule of AMD's GPU operator
            ("feature.node.kubernetes.io/amd-vgpu", _YES),
            ("amd.com/gpu.device-id", None),  # AMD's node labeller
            ("beta.amd.com/gpu.device-id", None),
        ),
        visible_variable="HIP_VISIBLE_DEVICES",
        device_files="sys/bus/pci/drivers/amdgpu/[0-9]*",
        images={"vllm": f"vllm/vllm-openai-rocm:{_VLLM}"},
    ),
    "intel-i915": _intel("intel-i915", "gpu.intel.com/i915"),
    "intel-xe": _intel("intel-xe", "gpu.intel.com/xe"),
    "gaudi": AcceleratorRow(
        engine=DEVICES["gaudi"],
        resource="habana.ai/gaudi",
        node_labels=(
            ("intel.feature.node.kubernetes.io/gaudi", _YES),  # Intel's rules for Node Feature Discovery
            ("feature.node.kubernetes.io/pci-1da3.present", _YES),  # as the Gaudi base operator configures it
            ("feature.node.kubernetes.io/pci-1200_1da3.present", _YES),  # as it comes: processing accelerator
        ),
        visible_variable="HABANA_VISIBLE_MODULES",
        device_files="sys/bus/pci/drivers/habanalabs/[0-9]*",
        startup_seconds=7200,
    ),
    "cpu": AcceleratorRow(
        engine=DEVICES["cpu"],
        # No device plugin serves this pod, so nothing hides the node's devices: an image made for CUDA asks the
        # container runtime for all devices of the node, and would get those of others.
        env={"NVIDIA_VISIBLE_DEVICES": "void"},
        images={"vllm": f"vllm/vllm-openai-cpu:{_VLLM}"},
    ),
}
