"""The smaller sections of the spec: verification, sidecar, observability, network policy."""

from typing import Annotated, Literal

from pydantic import Field

from mmrouter_lib.api.rules import Resource, rule
from mmrouter_lib.api.shared_types import Decimal, Resources


class Verification(Resource):
    """How the exactness of routing is measured, and the reaction to a failure."""

    on_failure: Literal["Degrade", "Refuse"] = "Degrade"
    """For a worker that is not verified in time: Degrade routes to it without overlap, Refuse does not route to it."""
    sample_ratio: Decimal = "0.01"
    """Share of requests whose predicted blocks are compared with the engine's own events, 0 to 1."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 300
    """Time within which a new worker must be verified."""

    @rule("sampleRatio", "sampleRatio is a share between 0 and 1", "double(self.sampleRatio) <= 1.0")
    def _ratio(self) -> bool:
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
