"""`spec.frontend`: the pods that run the router."""

from typing import Annotated, Literal

from pydantic import Field

from mmrouter_lib.api.rules import Resource
from mmrouter_lib.api.shared_types import Opaque, Resources, SecretName, Size


class Service(Resource):
    """The Service that clients connect to."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Kubernetes Service type."""
    port: Annotated[int, Field(ge=1, le=65535)] = 80
    """Port of the Service."""


class ApiKeys(Resource):
    """API keys of clients. Each key belongs to a tenant; tenants share no KV blocks."""

    secret: SecretName
    """Secret with one entry per tenant: its name is the tenant's, its value the tenant's API keys, one per line."""


class Frontend(Resource):
    """The routers, as equal replicas."""

    replicas: Annotated[int, Field(ge=1, le=100)] = 2
    """Number of frontend pods."""
    resources: Resources = Resources()
    """Compute resources of the router container."""
    max_held_bytes: Size = "1Gi"
    """Limit of request bodies in one router, each held until its answer is out; a router needs about four times as much
    memory. Requests above the limit are answered 429 with Retry-After."""
    service: Service = Service()
    """The Service in front of the routers."""
    api_keys: ApiKeys | None = None
    """API keys and their tenants. Absent: no authentication and a single tenant; the condition Authenticated is
    False."""
    pod_template: Opaque = Field(default={})
    """Strategic merge patch over the rendered pod template (`metadata` and `spec` of a pod)."""
