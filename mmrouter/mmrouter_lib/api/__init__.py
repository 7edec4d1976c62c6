"""The resource ``MMRouterDeployment`` (examples/full.yaml) as typed, immutable values."""

from mmrouter.api.accelerator import DEFAULT_BLOCK_SIZE, Accelerator, AcceleratorKind
from mmrouter.api.deployment import (
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
from mmrouter.api.engine import ChatTemplate, Engine, ProcessorOptions
from mmrouter.api.flags import EngineType
from mmrouter.api.frontend import ApiKeys, Frontend, Service
from mmrouter.api.model import Model
from mmrouter.api.operations import NetworkPolicy, Observability, Sidecar, Verification
from mmrouter.api.pools import (
    Autoscaling,
    Parallelism,
    Pool,
    Role,
    SharedMemory,
    Updates,
)
from mmrouter.api.quantity import quantity_bytes, quantity_value
from mmrouter.api.routing import Media, Routing
from mmrouter.api.spec import Spec
from mmrouter.api.status import Condition, FrontendStatus, PoolStatus, RoutingStatus, Status

__all__ = [
    "API_VERSION",
    "DEFAULT_BLOCK_SIZE",
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
