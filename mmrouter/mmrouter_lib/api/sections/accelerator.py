"""`spec.pools[].accelerator`: the devices of a pool."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrouter_lib.api.rules import Broken, Resource, broken, rule
from mmrouter_lib.api.shared_types import DNS_LABEL, ObjectName, by_key

AcceleratorKind = Literal["nvidia", "amd", "intel-i915", "intel-xe", "gaudi", "cpu"]


class Claim(Resource):
    """A claim on devices by dynamic resource allocation (DRA)."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
    """Name of the claim within the pod."""
    resource_claim_name: ObjectName | None = None
    """An existing ResourceClaim, shared by all pods of the pool."""
    resource_claim_template_name: ObjectName | None = None
    """A ResourceClaimTemplate, from which every pod gets its own claim."""

    @rule(
        "resourceClaimName",
        "set exactly one of resourceClaimName and resourceClaimTemplateName",
        "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
    )
    def _one_kind(self) -> bool:
        return (self.resource_claim_name is None) != (self.resource_claim_template_name is None)


_CLAIMS = "(has(self.claims) && size(self.claims) > 0)"


class Accelerator(Resource):
    """The pool's devices; rendered as resource limits, node selector, toleration and engine flags."""

    kind: AcceleratorKind
    """Kind of device; `cpu` for none."""
    count: Annotated[int, Field(ge=0, le=64)] | None = None
    """Devices per pod. Default: 1; 0 for cpu and with claims."""
    resource_name: (
        Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-A-Za-z0-9_.]+$")] | None
    ) = None
    """Extended resource instead of the kind's own, for instance a MIG profile such as `nvidia.com/mig-3g.40gb`."""
    claims: list[Claim] = Field(default=[], max_length=8, json_schema_extra=by_key("name"))
    """DRA claims instead of an extended resource."""

    @property
    def devices(self) -> int:
        """Return the number of extended resources to request: `count` with its default."""
        if self.count is not None:
            return self.count
        return 0 if self.kind == "cpu" or self.claims else 1

    @rule(
        "count",
        "a cpu pool has no devices: leave count out or set it to 0",
        "self.kind != 'cpu' || !has(self.count) || self.count == 0",
    )
    def _cpu_counts_nothing(self) -> bool:
        return self.kind != "cpu" or not self.count

    @rule(
        "resourceName",
        "a cpu pool has no devices: leave resourceName out",
        "self.kind != 'cpu' || !has(self.resourceName)",
    )
    def _cpu_names_no_resource(self) -> bool:
        return self.kind != "cpu" or self.resource_name is None

    @rule("claims", "a cpu pool has no devices: leave claims out", f"self.kind != 'cpu' || !{_CLAIMS}")
    def _cpu_claims_nothing(self) -> bool:
        return self.kind != "cpu" or not self.claims

    @rule("resourceName", "use either claims or resourceName, not both", f"!{_CLAIMS} || !has(self.resourceName)")
    def _claims_or_a_resource(self) -> bool:
        return not self.claims or self.resource_name is None

    @rule(
        "count",
        "use either claims or count, not both: a claim defines its number of devices",
        f"!{_CLAIMS} || !has(self.count) || self.count == 0",
    )
    def _claims_or_a_count(self) -> bool:
        return not self.claims or not self.count

    @rule(
        "count",
        "every kind but cpu needs at least one device or a claim",
        f"self.kind == 'cpu' || {_CLAIMS} || !has(self.count) || self.count > 0",
        says="'a pool of kind ' + self.kind + ' needs at least one device or a claim'",
    )
    def _has_a_device(self) -> bool | Broken:
        if self.kind == "cpu" or self.claims or self.devices > 0:
            return True
        return Broken("count", f"a pool of kind {self.kind} needs at least one device or a claim")

    @model_validator(mode="after")
    def _claims_differ(self) -> "Accelerator":
        names = [claim.name for claim in self.claims]
        if len(set(names)) != len(names):
            raise broken("claims", "claim names must differ")
        return self
