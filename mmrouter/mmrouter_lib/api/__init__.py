"""The resource ``MMRouterDeployment`` (examples/full.yaml) as typed, immutable values."""

from mmrouter_lib.api.deployment import (
    API_VERSION,
    KIND,
    Metadata,
    MMRouterDeployment,
    SpecError,
    block_size_of,
    load_deployment,
    parse_deployment,
    to_json,
)
from mmrouter_lib.api.engine_types import ENGINE_TYPES, EngineType
from mmrouter_lib.api.quantity import quantity_bytes, quantity_value
from mmrouter_lib.api.sections.accelerator import Accelerator, AcceleratorKind
from mmrouter_lib.api.sections.engine import ChatTemplate, Engine, ProcessorOptions
from mmrouter_lib.api.sections.frontend import ApiKeys, Frontend, Service
from mmrouter_lib.api.sections.model import Model
from mmrouter_lib.api.sections.operations import NetworkPolicy, Observability, Sidecar, Verification
from mmrouter_lib.api.sections.pools import Autoscaling, Parallelism, Pool, Role, SharedMemory, Updates
from mmrouter_lib.api.sections.routing import Media, Routing
from mmrouter_lib.api.spec import Spec
from mmrouter_lib.api.status import Condition, FrontendStatus, PoolStatus, RoutingStatus, Status

__all__ = [
    "API_VERSION",
    "ENGINE_TYPES",
    "KIND",
    "Accelerator",
    "AcceleratorKind",
    "ApiKeys",
    "Autoscaling",
    "ChatTemplate",
    "Condition",
    "Engine",
    "EngineType",
    "Frontend",
    "FrontendStatus",
    "MMRouterDeployment",
    "Media",
    "Metadata",
    "Model",
    "NetworkPolicy",
    "Observability",
    "Parallelism",
    "Pool",
    "PoolStatus",
    "ProcessorOptions",
    "Role",
    "Routing",
    "RoutingStatus",
    "Service",
    "SharedMemory",
    "Sidecar",
    "Spec",
    "SpecError",
    "Status",
    "Updates",
    "Verification",
    "block_size_of",
    "load_deployment",
    "parse_deployment",
    "quantity_bytes",
    "quantity_value",
    "to_json",
]
