"""`spec.pools[]`: replicas with the same role, image, flags and accelerator."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrouter.api.base import (
    DNS_LABEL,
    Argument,
    Decimal,
    Image,
    LabelValue,
    NodeLabels,
    ObjectName,
    Opaque,
    Resource,
    Resources,
    Size,
    broken,
)
from mmrouter.api.engine import BlockSize

Role = Literal["encoder", "prefill", "decode", "worker", "renderer"]
AcceleratorKind = Literal["nvidia", "amd", "intel-i915", "intel-xe", "gaudi", "cpu"]

DEFAULT_WEIGHT = 100
DEFAULT_BLOCK_SIZE: dict[AcceleratorKind, int] = {
    "nvidia": 16,
    "amd": 16,
    "intel-i915": 64,
    "intel-xe": 64,
    "gaudi": 128,
    "cpu": 128,
}
"""Tokens per vLLM block where neither pool nor engine says: the engine's own defaults per platform."""

DEFAULT_PAGE_SIZE: dict[AcceleratorKind, int] = {
    "nvidia": 16,
    "amd": 16,
    "intel-i915": 64,
    "intel-xe": 64,
    "gaudi": 64,
    "cpu": 16,
}
"""Tokens per SGLang page where neither pool nor engine says. The engine's own default is 1, a hash for every token;
16 is the smallest that its attention backends for CUDA take, 64 the smallest of those for XPU."""


class Claim(Resource):
    """A claim on devices by dynamic resource allocation (DRA)."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
    """Name of the claim within the pod."""
    resource_claim_name: ObjectName | None = None
    """An existing ResourceClaim, shared by all pods of the pool."""
    resource_claim_template_name: ObjectName | None = None
    """A ResourceClaimTemplate, of which every pod gets its own claim."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Claim":
        if (self.resource_claim_name is None) == (self.resource_claim_template_name is None):
            raise broken("resourceClaimName", "set exactly one of resourceClaimName and resourceClaimTemplateName")
        return self


class Accelerator(Resource):
    """What the pool's engines run on; becomes resource limits, node selector, toleration and engine flags."""

    kind: AcceleratorKind
    """Kind of device. `cpu` needs none."""
    count: Annotated[int, Field(ge=0, le=64)] | None = None
    """Devices per pod. Default: 1; 0 for cpu and with claims."""
    resource_name: (
        Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-A-Za-z0-9_.]+$")] | None
    ) = None
    """Extended resource instead of the kind's own, for instance a MIG profile such as `nvidia.com/mig-3g.40gb`."""
    claims: list[Claim] = Field(default=[], max_length=8)
    """DRA claims instead of an extended resource."""

    @property
    def devices(self) -> int:
        """Devices asked for by extended resource: `count` with its default."""
        if self.count is not None:
            return self.count
        return 0 if self.kind == "cpu" or self.claims else 1

    @model_validator(mode="after")
    def _consistent(self) -> "Accelerator":
        names = [claim.name for claim in self.claims]
        if len(set(names)) != len(names):
            raise broken("claims", "claim names must differ")
        if self.kind == "cpu":
            if self.count:
                raise broken("count", "a cpu pool has no devices: leave count out or set it to 0")
            if self.resource_name is not None:
                raise broken("resourceName", "a cpu pool has no devices: leave resourceName out")
            if self.claims:
                raise broken("claims", "a cpu pool has no devices: leave claims out")
        elif self.claims:
            if self.resource_name is not None:
                raise broken("resourceName", "use either claims or resourceName, not both")
            if self.count:
                raise broken(
                    "count", "use either claims or count, not both: a claim says itself how many devices it is"
                )
        elif self.devices == 0:
            raise broken("count", f"a pool of kind {self.kind} needs at least one device or a claim")
        return self


class Parallelism(Resource):
    """How one engine is spread over its devices."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor parallel size."""
    data: Annotated[int, Field(ge=1, le=64)] = 1
    """Data parallel ranks; each holds KV blocks of its own and is a candidate of its own."""


class SharedMemory(Resource):
    """Memory-backed files for the engine."""

    size: Size = "8Gi"
    """Upper limit; what is written counts against the container's memory."""
    scope: Literal["pod", "node"] = "pod"
    """pod: the pod's own /dev/shm. node: besides, one tmpfs directory for all pods of this deployment on the node. node
    uses a hostPath, so the namespace must allow it."""


class Autoscaling(Resource):
    """Let the number of replicas follow the load."""

    min_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Fewest replicas."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)]
    """Most replicas."""
    metric: Literal["kvUsage", "queueDepth", "encoderUtilization"] = "kvUsage"
    """What is measured, as a mean over the pool's replicas."""
    target: Decimal = "0.7"
    """Value of the metric to hold."""

    @model_validator(mode="after")
    def _ordered(self) -> "Autoscaling":
        if self.min_replicas > self.max_replicas:
            raise broken("minReplicas", "minReplicas must not exceed maxReplicas")
        return self


class Updates(Resource):
    """How a new version replaces the old one."""

    max_surge: Annotated[int, Field(ge=0, le=1000)] = 1
    """Replicas above the wanted number while updating; they need free accelerators."""
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = 0
    """Replicas that may be missing while updating."""
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """How long an old replica may finish its requests."""

    @model_validator(mode="after")
    def _moves(self) -> "Updates":
        if self.max_surge == 0 and self.max_unavailable == 0:
            raise broken("maxSurge", "maxSurge and maxUnavailable cannot both be 0: nothing could ever be updated")
        return self


class Toleration(Resource):
    """Lets pods onto nodes with a matching taint."""

    key: Annotated[str, Field(max_length=316)] | None = None
    """Taint key; absent matches every key and needs operator Exists."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Exists ignores the value."""
    value: LabelValue | None = None
    """Taint value, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; absent matches every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """How long the pod stays after the taint, with effect NoExecute."""

    @model_validator(mode="after")
    def _consistent(self) -> "Toleration":
        if self.operator == "Exists" and self.value:
            raise broken("value", "operator Exists takes no value")
        if self.operator == "Equal" and not self.key:
            raise broken("key", "operator Equal needs a key")
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise broken("tolerationSeconds", "tolerationSeconds needs effect NoExecute")
        return self


class Pool(Resource):
    """Replicas with the same role, image, flags and accelerator."""

    name: Annotated[str, Field(min_length=1, max_length=20, pattern=DNS_LABEL)]
    """Name, unique in the deployment. Children are called `<deployment>-<pool>`."""
    role: Role
    """encoder, prefill, decode, worker (prefill and decode in one) or renderer (without accelerator). Immutable: add
    another pool."""
    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Number of engine pods; the starting point where autoscaling is set."""
    weight: Annotated[int, Field(ge=0, le=1000)] = DEFAULT_WEIGHT
    """Share of encoder work by the weighted scheduling modes; role encoder only."""
    parallelism: Parallelism = Parallelism()
    """How one engine is spread over its devices."""
    accelerator: Accelerator
    """What the engines run on."""
    block_size: BlockSize | None = None
    """Tokens per KV block in this pool. Default: `engine.blockSize`, else by accelerator."""
    node_selector: NodeLabels = Field(default={})
    """Node labels, added to the accelerator's own."""
    tolerations: list[Toleration] = Field(default=[], max_length=32)
    """Tolerations, added to the accelerator's own."""
    args: list[Argument] = Field(default=[], max_length=100)
    """More engine arguments, after those of `engine.args`."""
    image: Image = ""
    """Container image of this pool. Default: `engine.image`."""
    shared_memory: SharedMemory = SharedMemory()
    """Memory-backed files for the engine."""
    resources: Resources = Resources()
    """Compute resources of the engine container, besides its accelerators."""
    autoscaling: Autoscaling | None = None
    """Let the number of replicas follow the load."""
    updates: Updates = Updates()
    """How a new version replaces the old one."""
    pod_template: Opaque = Field(default={})
    """Strategic merge patch over the rendered pod template (`metadata` and `spec` of a pod)."""

    @model_validator(mode="after")
    def _consistent(self) -> "Pool":
        if self.name == "frontend":
            raise broken("name", "`frontend` is the name of the routers' own pods; call the pool something else")
        if self.role != "encoder" and self.weight != DEFAULT_WEIGHT:
            raise broken("weight", "weight is for encoder pools")
        ranks = self.parallelism.tensor * self.parallelism.data
        accelerator = self.accelerator
        if accelerator.kind != "cpu" and not accelerator.claims and ranks > accelerator.devices:
            tensor, data = self.parallelism.tensor, self.parallelism.data
            raise broken(
                "accelerator.count", f"tensor {tensor} x data {data} needs {ranks} devices, not {accelerator.devices}"
            )
        return self
