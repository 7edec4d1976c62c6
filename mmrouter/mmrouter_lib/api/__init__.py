"""The custom resource ``MMRouterDeployment`` (examples/full.yaml) as typed, immutable values."""

from mmrouter_lib.api.deployment import (
    MMRouterDeployment,
    SpecError,
    block_size_of,
    load_deployment,
    parse_deployment,
    to_json,
)
from mmrouter_lib.api.engine_traits import EngineType
from mmrouter_lib.api.pools import Pool, Role
from mmrouter_lib.api.routing import Media
from mmrouter_lib.api.shared_types import AcceleratorKind, quantity_bytes, quantity_value

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
