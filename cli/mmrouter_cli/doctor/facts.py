"""What the checks look at: everything that was read, as it was read. What could not be read has its reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmrouter_cli.status.frontend_state import State, Unread
from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.model.external_refs import Reference

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What does not belong to one deployment."""

    now: float
    """Seconds since the epoch, by this machine's clock."""
    apis: frozenset[str] | Unread
    """Served `group/version` texts."""
    crd: Object | Unread | None
    leases: tuple[Object, ...] | Unread
    """Leases with the operator's name, of all namespaces."""
    renewed: bool = False
    """Whether a Lease changed while it was looked at, which no clock is needed for."""
    operators: tuple[Object, ...] | Unread = ()
    """Pods of the operator, of all namespaces."""
    nodes: tuple[Object, ...] | Unread = ()
    pods: tuple[Object, ...] | Unread = ()
    """Pods of all namespaces that have not ended: what nodes have left follows from them."""


@dataclass(frozen=True, slots=True)
class DeploymentFacts:
    """One deployment, and what belongs to it."""

    resource: Object
    dep: MMRouterDeployment | SpecError
    namespace: Object | Unread
    pods: tuple[Object, ...] | Unread
    found: Mapping[Reference, Object | Unread | None] = field(default_factory=dict)
    """What the resource names and does not own."""
    shared_memory: Mapping[str, tuple[int, int]] | Unread = field(default_factory=dict)
    """Pod -> bytes used and size of its /dev/shm, where the kubelet says."""

    @property
    def name(self) -> str:
        """The deployment's name."""
        return str(self.resource["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class FrontendFacts:
    """One frontend, asked twice with a moment between; the second answer is that of a frontend that gave a first."""

    name: str
    first: State | Unread
    second: State | Unread


@dataclass(frozen=True, slots=True)
class RoutingFacts:
    """All frontends of a deployment. ``seconds``: between the two questions."""

    frontends: tuple[FrontendFacts, ...]
    seconds: float
    reach: str = "Give the URL of a frontend's control API with --control and its token with --token."
    """What to do where a frontend cannot be asked."""
