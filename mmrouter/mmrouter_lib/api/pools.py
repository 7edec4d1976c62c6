"""`spec.pools[]`: replicas with the same role, image, flags and accelerator."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrouter_lib.api.cross_field_rules import NO_DEFAULT, Broken, Resource, broken, immutable, rule
from mmrouter_lib.api.engine import BlockSize
from mmrouter_lib.api.shared_types import (
    DNS_LABEL,
    LABEL_NAME,
    AcceleratorKind,
    Argument,
    Decimal,
    Image,
    LabelValue,
    NodeLabels,
    ObjectName,
    Opaque,
    Resources,
    Size,
    by_key,
)

Role = Literal["encoder", "prefill", "decode", "worker", "renderer"]
DEFAULT_WEIGHT = 100
_DEVICES = "(has(self.accelerator.count) ? self.accelerator.count : 1)"


class Parallelism(Resource):
    """Distribution of one engine over its devices."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor parallel size."""
    data: Annotated[int, Field(ge=1, le=64)] = 1
    """Data parallel ranks; each has its own KV cache and is a separate candidate for requests."""


class SharedMemory(Resource):
    """Memory-backed files for the engine."""

    size: Size = "8Gi"
    """Upper limit; bytes count against the memory limit of the container that writes them. The largest size of the
    pools of scope node also bounds the directory of a node."""
    scope: Literal["pod", "node"] = "pod"
    """pod: the pod's own /dev/shm. node: in addition, one tmpfs directory for all pods of this deployment on the node,
    by a hostPath that the namespace must allow."""


class Autoscaling(Resource):
    """Scale the number of replicas with the load."""

    min_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Minimum number of replicas."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)]
    """Maximum number of replicas."""
    metric: Literal["kvUsage", "queueDepth", "encoderUtilization"] = "kvUsage"
    """Metric to scale by, as the mean over the pool's replicas."""
    target: Decimal = "0.7"
    """Target value of the metric."""

    @rule("minReplicas", "self.minReplicas <= self.maxReplicas")
    def _ordered(self) -> bool:
        """minReplicas must not exceed maxReplicas"""
        return self.min_replicas <= self.max_replicas

    @rule("target", "double(self.target) > 0.0")
    def _aims_at_something(self) -> bool:
        """target must be above 0"""
        return float(self.target) > 0

    @rule("target", "self.metric == 'queueDepth' || double(self.target) <= 1.0")
    def _shares_are_at_most_one(self) -> bool:
        """kvUsage and encoderUtilization are shares: target is at most 1"""
        return self.metric == "queueDepth" or float(self.target) <= 1


class Updates(Resource):
    """How a new version replaces the old one."""

    max_surge: Annotated[int, Field(ge=0, le=1000)] = 1
    """Additional replicas during an update; they need free accelerators."""
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = 0
    """Replicas that may be missing during an update."""
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """Time for an old replica to finish its requests."""

    @rule("maxSurge", "self.maxSurge > 0 || self.maxUnavailable > 0")
    def _moves(self) -> bool:
        """maxSurge and maxUnavailable cannot both be 0: no update would ever proceed"""
        return self.max_surge > 0 or self.max_unavailable > 0


class Toleration(Resource):
    """Lets pods onto nodes with a matching taint."""

    key: Annotated[str, Field(max_length=316, pattern=LABEL_NAME)] | None = None
    """Taint key; absent matches every key and needs operator Exists."""
    operator: Annotated[Literal["Exists", "Equal"], Field(json_schema_extra={NO_DEFAULT: True})] = "Equal"
    """Exists ignores the value. Default: Equal."""
    value: LabelValue | None = None
    """Taint value, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; absent matches every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """How long the pod stays after the taint, with effect NoExecute."""

    @rule("value", "!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''")
    def _exists_takes_no_value(self) -> bool:
        """operator Exists takes no value"""
        return self.operator != "Exists" or not self.value

    @rule("key", "has(self.key) || (has(self.operator) && self.operator == 'Exists')")
    def _equal_needs_a_key(self) -> bool:
        """operator Equal needs a key"""
        return self.key is not None or self.operator == "Exists"

    @rule("tolerationSeconds", "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')")
    def _seconds_need_eviction(self) -> bool:
        """tolerationSeconds needs effect NoExecute"""
        return self.toleration_seconds is None or self.effect == "NoExecute"


class Claim(Resource):
    """A claim on devices by dynamic resource allocation (DRA)."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
    """Name of the claim within the pod."""
    resource_claim_name: ObjectName | None = None
    """An existing ResourceClaim, shared by all pods of the pool."""
    resource_claim_template_name: ObjectName | None = None
    """A ResourceClaimTemplate, from which every pod gets its own claim."""

    @rule("resourceClaimName", "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)")
    def _one_kind(self) -> bool:
        """set exactly one of resourceClaimName and resourceClaimTemplateName"""
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

    @rule("count", "self.kind != 'cpu' || !has(self.count) || self.count == 0")
    def _cpu_counts_nothing(self) -> bool:
        """a cpu pool has no devices: leave count out or set it to 0"""
        return self.kind != "cpu" or not self.count

    @rule("resourceName", "self.kind != 'cpu' || !has(self.resourceName)")
    def _cpu_names_no_resource(self) -> bool:
        """a cpu pool has no devices: leave resourceName out"""
        return self.kind != "cpu" or self.resource_name is None

    @rule("claims", f"self.kind != 'cpu' || !{_CLAIMS}")
    def _cpu_claims_nothing(self) -> bool:
        """a cpu pool has no devices: leave claims out"""
        return self.kind != "cpu" or not self.claims

    @rule("resourceName", f"!{_CLAIMS} || !has(self.resourceName)")
    def _claims_or_a_resource(self) -> bool:
        """use either claims or resourceName, not both"""
        return not self.claims or self.resource_name is None

    @rule("count", f"!{_CLAIMS} || !has(self.count) || self.count == 0")
    def _claims_or_a_count(self) -> bool:
        """use either claims or count, not both: a claim defines its number of devices"""
        return not self.claims or not self.count

    @rule(
        "count",
        f"self.kind == 'cpu' || {_CLAIMS} || !has(self.count) || self.count > 0",
        says="'a pool of kind ' + self.kind + ' needs at least one device or a claim'",
    )
    def _has_a_device(self) -> bool | Broken:
        """every kind but cpu needs at least one device or a claim"""
        held = self.kind == "cpu" or self.claims or self.devices > 0
        return bool(held) or Broken("count", f"a pool of kind {self.kind} needs at least one device or a claim")

    @model_validator(mode="after")
    def _claims_differ(self) -> "Accelerator":
        names = [claim.name for claim in self.claims]
        if len(set(names)) != len(names):
            raise broken("claims", "claim names must differ")
        return self


class Pool(Resource):
    """Replicas with the same role, image, flags and accelerator."""

    name: Annotated[str, Field(min_length=1, max_length=20, pattern=DNS_LABEL)]
    """Name, unique in the deployment. Children are named `<deployment>-<pool>`."""
    role: Annotated[Role, Field(json_schema_extra=immutable("role is immutable: add another pool"))]
    """encoder, prefill, decode, worker (prefill and decode in one) or renderer (without accelerator). Immutable: add
    another pool."""
    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Number of engine pods; the initial number with autoscaling."""
    weight: Annotated[int, Field(ge=0, le=1000, json_schema_extra={NO_DEFAULT: True})] = DEFAULT_WEIGHT
    """Share of encoder work by the weighted scheduling modes; role encoder only. Default: 100."""
    parallelism: Parallelism = Parallelism()
    """Distribution of one engine over its devices."""
    accelerator: Accelerator
    """Devices of the engines."""
    block_size: BlockSize | None = None
    """Tokens per KV block in this pool. Default: `engine.blockSize`, else by accelerator."""
    node_selector: NodeLabels = Field(default={})
    """Node labels, added to the accelerator's own."""
    tolerations: list[Toleration] = Field(default=[], max_length=32)
    """Tolerations, added to the accelerator's own."""
    args: list[Argument] = Field(default=[], max_length=64)
    """Additional engine arguments, after those of `engine.args`."""
    image: Image = ""
    """Container image of this pool. Default: `engine.image`."""
    shared_memory: SharedMemory = SharedMemory()
    """Memory-backed files for the engine."""
    resources: Resources = Resources()
    """Compute resources of the engine container, besides its accelerators."""
    autoscaling: Autoscaling | None = None
    """Scale the number of replicas with the load."""
    updates: Updates = Updates()
    """How a new version replaces the old one."""
    pod_template: Opaque = Field(default={})
    """Strategic merge patch over the rendered pod template (`metadata` and `spec` of a pod)."""

    @rule("name", "self.name != 'frontend'")
    def _name_is_free(self) -> bool:
        """`frontend` is the name of the routers' own pods; choose another name for the pool"""
        return self.name != "frontend"

    @rule("weight", "self.role == 'encoder' || !has(self.weight)")
    def _weight_is_for_encoders(self) -> bool:
        """weight is for encoder pools"""
        return self.role == "encoder" or "weight" not in self.model_fields_set

    @rule("replicas", "!has(self.autoscaling) || self.replicas > 0")
    def _scaling_starts_above_nothing(self) -> bool:
        """an autoscaled pool starts with 1 replica or more: nothing is measured at 0, so it would stay there"""
        return self.autoscaling is None or self.replicas > 0

    @rule("autoscaling", "!has(self.autoscaling) || self.role != 'renderer'")
    def _scaling_has_a_metric(self) -> bool:
        """renderer pools have no metric to scale by"""
        return self.autoscaling is None or self.role != "renderer"

    @rule(
        "accelerator.count",
        "self.accelerator.kind == 'cpu' || (has(self.accelerator.claims) && size(self.accelerator.claims) > 0) || "
        f"self.parallelism.tensor * self.parallelism.data <= {_DEVICES}",
    )
    def _a_device_for_every_rank(self) -> bool | Broken:
        """every rank needs a device: accelerator.count must be at least parallelism.tensor x parallelism.data"""
        tensor, data, accelerator = self.parallelism.tensor, self.parallelism.data, self.accelerator
        if accelerator.kind == "cpu" or accelerator.claims or tensor * data <= accelerator.devices:
            return True
        return Broken(
            "accelerator.count",
            f"tensor {tensor} x data {data} needs {tensor * data} devices, not {accelerator.devices}",
        )
