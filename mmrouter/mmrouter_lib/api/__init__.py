"""The custom resource ``MMRouterDeployment`` (examples/full.yaml) as typed, immutable values."""

from mmrouter_lib.api.deployment import MMRouterDeployment as MMRouterDeployment
from mmrouter_lib.api.deployment import SpecError as SpecError
from mmrouter_lib.api.deployment import block_size_of as block_size_of
from mmrouter_lib.api.deployment import load_deployment as load_deployment
from mmrouter_lib.api.deployment import parse_deployment as parse_deployment
from mmrouter_lib.api.deployment import to_json as to_json
from mmrouter_lib.api.engine_traits import EngineType as EngineType
from mmrouter_lib.api.minor_sections import TenantLimits as TenantLimits
from mmrouter_lib.api.minor_sections import Tenants as Tenants
from mmrouter_lib.api.pools import Pool as Pool
from mmrouter_lib.api.pools import Role as Role
from mmrouter_lib.api.routing import Media as Media
from mmrouter_lib.api.shared_types import AcceleratorKind as AcceleratorKind
from mmrouter_lib.api.shared_types import quantity_bytes as quantity_bytes
from mmrouter_lib.api.shared_types import quantity_value as quantity_value
