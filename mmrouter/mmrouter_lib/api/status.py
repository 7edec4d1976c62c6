"""`status`: what the operator reports. Programs read the conditions."""

from typing import Annotated, Literal

from pydantic import Field

from mmrouter_lib.api.cross_field_rules import Resource
from mmrouter_lib.api.pools import Role
from mmrouter_lib.api.shared_types import DNS_LABEL, Decimal, by_key

Count = Annotated[int, Field(ge=0, le=1_000_000)]


class Condition(Resource):
    """One aspect of the deployment's state (metav1.Condition)."""

    type: Annotated[str, Field(max_length=316, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?$")]
    """Name of the aspect."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that the condition describes."""
    last_transition_time: Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
    """When status last changed."""
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Stable reason in one word, for programs."""
    message: Annotated[str, Field(max_length=32_768)]
    """Explanation for people."""


class PoolStatus(Resource):
    """Replicas of one pool."""

    name: Annotated[str, Field(max_length=20, pattern=DNS_LABEL)]
    """Name of the pool."""
    role: Role
    """Role of the pool."""
    desired: Count = 0
    """Desired replicas."""
    ready: Count = 0
    """Replicas that are Ready."""
    routable: Count = 0
    """Replicas whose cache index every frontend holds."""
    verified: Count = 0
    """Replicas whose canary proved exact routing."""
    updated: Count = 0
    """Replicas of the newest version."""


class FrontendStatus(Resource):
    """Replicas of the frontend; the `scale` subresource reads them."""

    desired: Count = 0
    """Desired replicas."""
    ready: Count = 0
    """Replicas that are Ready."""
    updated: Count = 0
    """Replicas of the newest version."""
    selector: Annotated[str, Field(max_length=1024)] = ""
    """Label selector of the frontend's pods, as text."""


class RoutingStatus(Resource):
    """Measured quality of routing, rounded."""

    exact_ratio: Decimal | None = None
    """Share of decisions that were exact."""
    hit_ratio: Decimal | None = None
    """Share of prompt blocks that were found cached."""


class Status(Resource):
    """What the operator observed."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status describes."""
    phase: Annotated[str, Field(max_length=40)] | None = None
    """One-word summary for people; programs read the conditions."""
    endpoint: Annotated[str, Field(max_length=500)] | None = None
    """URL for clients in the cluster."""
    frontend: FrontendStatus | None = None
    """Replicas of the frontend."""
    pools_ready: Annotated[str, Field(max_length=20)] | None = None
    """Pools with all replicas Ready, of all pools, like "2/3": a column of `kubectl get`."""
    pools: list[PoolStatus] = Field(default=[], max_length=16, json_schema_extra=by_key("name"))
    """Replicas of each pool."""
    routing: RoutingStatus | None = None
    """Measured quality of routing."""
    conditions: list[Condition] = Field(default=[], max_length=64, json_schema_extra=by_key("type"))
    """Ready, Progressing, Degraded, FrontendReady, WorkersReady, ExactRoutingVerified, SpecValid and more."""
