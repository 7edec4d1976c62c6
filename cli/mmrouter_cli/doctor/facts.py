"""Facts for the checks: objects as they were read, or the reason they could not be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmrouter_cli.status.frontend_state import State, Unread
from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.model.external_refs import Reference

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Facts that belong to no deployment."""

    now: float
    """Seconds since the epoch, by this machine's clock."""
    apis: frozenset[str] | Unread
    """Served `group/version` texts."""
    crd: Object | Unread | None
    leases: tuple[Object, ...] | Unread
    """Leases of operators, in all namespaces."""
    renewed: bool = False
    """Whether a Lease was renewed while it was observed, independent of clocks."""
    operators: tuple[Object, ...] | Unread = ()
    """Pods of operators, in all namespaces."""
    nodes: tuple[Object, ...] | Unread = ()
    pods: tuple[Object, ...] | Unread = ()
    """Pods of all namespaces that have not ended; they determine what nodes have left."""


@dataclass(frozen=True, slots=True)
class DeploymentFacts:
    """One deployment and its objects."""

    resource: Object
    dep: MMRouterDeployment | SpecError
    namespace: Object | Unread
    pods: tuple[Object, ...] | Unread
    referred: Mapping[Reference, Object | Unread | None] = field(default_factory=dict)
    """Objects that the resource names and does not own; ``None``: missing."""
    shared_memory: Mapping[str, tuple[int, int]] | Unread = field(default_factory=dict)
    """Pod -> used bytes and size of its /dev/shm, where the kubelet reports it."""

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class FrontendFacts:
    """One frontend, queried twice; a failure of the first query stands in both."""

    name: str
    first: State | Unread
    second: State | Unread


@dataclass(frozen=True, slots=True)
class RoutingFacts:
    """All frontends of a deployment; ``seconds`` between the two queries."""

    frontends: tuple[FrontendFacts, ...]
    seconds: float
    advice: str = "Give the URL of a frontend's control API with --control and its token with --token."
    """Advice for a frontend that cannot be queried."""
