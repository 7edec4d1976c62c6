"""Declaration of a kind of child object, and the input that every renderer takes."""

from dataclasses import dataclass
from typing import Literal

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SecretData
from mmrouter_operator.model.kinds import Capabilities, Kind


@dataclass(frozen=True, slots=True)
class RenderInputs:
    """What the children of a deployment are rendered from. ``keys`` is the fingerprint of ``secrets``."""

    dep: MMRouterDeployment
    secrets: SecretData
    keys: str
    capabilities: Capabilities
    config: OperatorConfig


@dataclass(frozen=True, slots=True)
class ChildKind(Kind):
    """A kind of child object, declared once in its render file.

    The order of writes, the watches, the operator's RBAC rules, pruning and what the local substrate runs follow from
    this declaration.
    """

    wave: int = 4
    """Children of a lower wave are written first: pods must find what they mount. Workloads are wave 3."""
    guard: Literal["creation", "removal", "none"] = "none"
    """``creation``: no new Deployment is created while a child of this kind cannot be written, because its pods would
    run unprotected. ``removal``: nothing that it replaces is deleted. The first implies the second."""
    local: bool = False
    """Whether the local substrate (``mmrouter up``) acts on it; the others have a meaning only in a cluster."""
    optional: bool = False
    """Whether it exists only in clusters that serve its API."""
    lifecycle: Literal["pruned", "permanent", "created"] = "pruned"
    """``pruned``: deleted once it is no longer rendered. ``permanent``: rendered for every deployment, so never
    deleted. ``created``: created once and never changed."""

    @property
    def verbs(self) -> list[str]:
        """What the operator must be allowed to do with it. ``get`` looks at an object of its name before the first
        write; ``create`` and ``patch`` are server-side apply."""
        more = {"pruned": ["patch", "delete"], "permanent": ["patch"], "created": []}
        return ["get", "list", "watch", "create", *more[self.lifecycle]]
