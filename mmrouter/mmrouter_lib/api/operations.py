"""The smaller sections of the spec: verification, sidecar, observability, network policy."""

from typing import Annotated, Literal

from pydantic import Field

from mmrouter_lib.api.cross_field_rules import Resource, rule
from mmrouter_lib.api.shared_types import Decimal, ObjectName, Opaque, Resources, SecretName, Size


class Verification(Resource):
    """How the exactness of routing is measured, and the reaction to a failure."""

    on_failure: Literal["Degrade", "Refuse"] = "Degrade"
    """For a worker that is not verified in time: Degrade routes to it without overlap, Refuse does not route to it."""
    sample_ratio: Decimal = "0.01"
    """Share of requests whose predicted blocks are compared with the engine's own events, 0 to 1."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 300
    """Time within which a new worker must be verified."""

    @rule("sampleRatio", "double(self.sampleRatio) <= 1.0")
    def _ratio(self) -> bool:
        """sampleRatio is a share between 0 and 1"""
        return float(self.sample_ratio) <= 1


class Sidecar(Resource):
    """The relay of KV events beside every engine."""

    resources: Resources = Resources()
    """Compute resources of the sidecar container."""
    buffer_events: Annotated[int, Field(ge=100, le=1_000_000)] = 10_000
    """Deltas and raw event batches kept for replay and for `explain`."""


class Observability(Resource):
    """Metrics, traces and debugging headers."""

    pod_monitor: Literal["Auto", "Enabled", "Disabled"] = "Auto"
    """PodMonitor objects for Prometheus; Auto creates them if the cluster serves that API."""
    otlp_endpoint: Annotated[str, Field(max_length=500, pattern=r"^(https?://[^\x00-\x20\x7f]+)?$")] = ""
    """Base URL of a collector for traces by OTLP over HTTP (`http://HOST:4318`); empty for none."""
    debug_headers: bool = False
    """Add worker, exactness and overlap headers to every response. They reveal other tenants' prompts: use them in test
    installations only."""


class NetworkPolicy(Resource):
    """Network policies that isolate the deployment's pods."""

    enabled: bool = True
    """Create NetworkPolicies."""


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


class Tls(Resource):
    """TLS on the routers' port for clients."""

    secret_name: ObjectName
    """Secret of type kubernetes.io/tls with the certificate chain (`tls.crt`) and its key (`tls.key`). Changes are
    loaded without a restart."""


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
    tls: Tls | None = None
    """TLS on the client port, which then serves no plain HTTP. Absent: plain HTTP."""
    pod_template: Opaque = Field(default={})
    """Strategic merge patch over the rendered pod template (`metadata` and `spec` of a pod)."""

    @rule("service.port", "!has(self.tls) || self.service.port != 80")
    def _tls_port(self) -> bool:
        """port 80 is the port of plain HTTP: with frontend.tls set service.port to 443 or another port"""
        return self.tls is None or self.service.port != 80
