"""The custom resource ``MMRouterDeployment`` (examples/full.yaml) as typed, immutable values."""

from mmrouter_lib.api.deployment import (
    MMRouterDeployment,
    SpecError,
    block_size_of,
    load_deployment,
    parse_deployment,
    to_json,
)
from mmrouter_lib.api.engine_types import EngineType
from mmrouter_lib.api.quantity import quantity_bytes, quantity_value
from mmrouter_lib.api.sections.accelerator import AcceleratorKind
from mmrouter_lib.api.sections.pools import Pool, Role
from mmrouter_lib.api.sections.routing import Media

__all__ = [
    "AcceleratorKind",
    "EngineType",
    "MMRouterDeployment",
    "Media",
    "Pool",
    "Role",
    "SpecError",
    "block_size_of",
    "load_deployment",
    "parse_deployment",
    "quantity_bytes",
    "quantity_value",
    "to_json",
]
