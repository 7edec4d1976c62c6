"""The smaller sections of the spec: verification, sidecar, observability, network policy."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrouter_lib.api.cross_field_rules import Broken, Resource, broken, rule
from mmrouter_lib.api.shared_types import (
    DNS_LABEL,
    HOSTNAME,
    DataKey,
    Decimal,
    ObjectName,
    Opaque,
    Resources,
    SecretName,
    Size,
    by_key,
)

_DIVISIBLE = " && ".join(
    f"(!has(%s.{limit}) || %s.{limit} >= self.replicas)" for limit in ("requestsPerMinute", "concurrency")
)
"""CEL for: every router's part of a tenant's limits is at least one request."""


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
    page_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of a second Service, NAME-page, for the live page. It opens the control port, which has no TLS and requires
    the control token, to everyone who reaches the pods. Absent: the page is reached by forwarded ports."""


class ApiKeys(Resource):
    """API keys of clients. Each key belongs to a tenant; tenants share no KV blocks."""

    secret: SecretName
    """Secret with one entry per tenant: its name is the tenant's, its value the tenant's API keys, one per line."""


class Tls(Resource):
    """TLS on the routers' port for clients."""

    secret_name: ObjectName
    """Secret of type kubernetes.io/tls with the certificate chain (`tls.crt`) and its key (`tls.key`). Changes are
    loaded without a restart."""


class TenantLimits(Resource):
    """What one tenant may use, and its priority."""

    requests_per_minute: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Requests per minute on average; after a pause, as many are admitted at once. Above it: 429 rate_limited. Absent:
    no limit."""
    concurrency: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Requests under way at the same time. Above it: 429 concurrency_limited. Absent: no limit."""
    priority: Literal["high", "standard", "low"] = "standard"
    """Share of turns among tenants with waiting requests while all engines are full: high gets 16 turns, standard 4,
    low 1."""


class NamedTenant(TenantLimits):
    """One tenant's own limits, instead of the default ones."""

    name: DataKey
    """Name of the tenant: its entry in the Secret of apiKeys."""


class Tenants(Resource):
    """Limits of tenants, each divided by the number of routers, and turns while all engines are full."""

    default: TenantLimits = TenantLimits()
    """Limits of every tenant that is not in `named`."""
    named: list[NamedTenant] = Field(default=[], max_length=1024, json_schema_extra=by_key("name"))
    """Tenants with their own limits, instead of the default ones. A limit that an entry omits does not apply. A map by
    `name`."""
    max_wait_seconds: Annotated[int, Field(ge=0, le=600)] = 10
    """How long a request may wait for its turn when all engines have routing.maxQueuedRequests; then it is answered
    429 queue_full. At most routing.maxQueuedRequests requests wait in one router. 0: no request waits."""

    @model_validator(mode="after")
    def _names_differ(self) -> "Tenants":
        # The API server checks this by itself: the list is a map by name.
        seen: set[str] = set()
        for number, tenant in enumerate(self.named):
            if tenant.name in seen:
                raise broken(
                    f"named[{number}].name", f"the tenant {tenant.name!r} is already listed; names must differ"
                )
            seen.add(tenant.name)
        return self


class GatewayRef(Resource):
    """A Gateway that the route belongs to."""

    name: ObjectName
    """Name of the Gateway."""
    namespace: Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)] | None = None
    """Namespace of the Gateway, whose listener must admit routes of this one. Absent: this one."""
    section_name: ObjectName | None = None
    """Name of the Gateway's listener. Absent: every listener that admits the route."""


class Gateway(Resource):
    """An HTTPRoute from Gateways to the deployment: to the frontends' Service, or where the mode has a picker to the
    InferencePool."""

    parent_refs: list[GatewayRef] = Field(min_length=1, max_length=16)
    """The Gateways."""
    hostnames: list[Annotated[str, Field(min_length=1, max_length=253, pattern=HOSTNAME)]] = Field(
        default=[], max_length=16
    )
    """Host names of requests for this deployment, such as `models.example.com` or `*.example.com`. Absent: those of the
    listener."""
    model_header: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9-]+$")] | None = None
    """Header in which the gateway puts a request's model, such as `x-gateway-model-name`: the route takes only requests
    for model.servedName. Absent: it takes all requests of its host names."""
    request_timeout: Annotated[str, Field(max_length=20, pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")] | None = None
    """Time for a whole answer, streams included, such as `30m`; `0s` for no limit. Absent: the gateway's own limit,
    which is 15 s at some."""


class Frontend(Resource):
    """The routers, as equal replicas."""

    mode: Literal["frontend", "endpointPicker", "frontendPicker"] = "frontend"
    """frontend: clients connect to the routers. endpointPicker: the routers also choose the engines for the requests of
    a gateway of the Gateway API Inference Extension, which sends them there itself. frontendPicker: they choose a
    router for each of these requests, which it serves like those of its clients."""
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
    """TLS on the client port, which then serves no plain HTTP, and on the endpoint picker's. Absent: plain HTTP for
    clients."""
    picker_tls: Literal["auto", "none"] = "auto"
    """Encryption of the endpoint picker's port. auto: TLS, as most gateways expect, with the certificate of `tls`, or
    without it one that each router signs itself at its start. none: plain HTTP/2."""
    gateway: Gateway | None = None
    """An HTTPRoute from Gateways to the deployment. Absent: none is created."""
    tenants: Tenants | None = None
    """Limits and priorities of tenants. Absent: tenants have no limits, and no request waits while all engines are
    full."""
    pod_template: Opaque = Field(default={})
    """Strategic merge patch over the rendered pod template (`metadata` and `spec` of a pod)."""

    @rule("service.port", "!has(self.tls) || self.service.port != 80")
    def _tls_port(self) -> bool:
        """port 80 is the port of plain HTTP: with frontend.tls set service.port to 443 or another port"""
        return self.tls is None or self.service.port != 80

    @rule("tls", "!has(self.tls) || self.mode != 'frontendPicker'")
    def _pool_is_plain(self) -> bool:
        """with mode: frontendPicker gateways reach the routers by plain HTTP: remove frontend.tls"""
        return self.tls is None or self.mode != "frontendPicker"

    @rule("gateway", "!has(self.gateway) || !has(self.tls) || self.mode != 'frontend'")
    def _route_is_plain(self) -> bool:
        """the route leads to plain HTTP: remove frontend.tls, or use your own HTTPRoute with a BackendTLSPolicy"""
        return self.gateway is None or self.tls is None or self.has_picker

    @rule("service.port", "self.mode == 'frontend' || self.service.port != 9002")
    def _picker_port(self) -> bool:
        """port 9002 of the Service is the endpoint picker's: set service.port to another port"""
        return not self.has_picker or self.service.port != 9002

    @rule("pickerTls", "self.mode != 'frontend' || self.pickerTls == 'auto'")
    def _picker_to_encrypt(self) -> bool:
        """pickerTls is for the port of an endpoint picker, and mode: frontend has none"""
        return self.has_picker or self.picker_tls == "auto"

    @rule("tenants", "!has(self.tenants) || has(self.apiKeys)")
    def _tenants_have_keys(self) -> bool:
        """tenants needs apiKeys: without keys all clients are one tenant"""
        return self.tenants is None or self.api_keys is not None

    @rule("tenants", f"!has(self.tenants) || ({_DIVISIBLE.replace('%s', 'self.tenants.default')})")
    def _default_is_divisible(self) -> bool | Broken:
        """the default limits are divided by frontend.replicas, so each must be at least as large"""
        return self.tenants is None or self._divides(self.tenants.default) or Broken("tenants.default")

    @rule(
        "tenants",
        f"!has(self.tenants) || !has(self.tenants.named) || self.tenants.named.all(t, {_DIVISIBLE.replace('%s', 't')})",
    )
    def _named_are_divisible(self) -> bool | Broken:
        """a named tenant's limits are divided by frontend.replicas, so each must be at least as large"""
        named = self.tenants.named if self.tenants is not None else []
        undivided = next((number for number, limits in enumerate(named) if not self._divides(limits)), None)
        return undivided is None or Broken(f"tenants.named[{undivided}]")

    @property
    def has_picker(self) -> bool:
        """Whether a gateway asks the routers where requests go."""
        return self.mode != "frontend"

    def _divides(self, limits: TenantLimits) -> bool:
        return all(
            limit is None or limit >= self.replicas for limit in (limits.requests_per_minute, limits.concurrency)
        )
