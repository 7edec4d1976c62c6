"""Every kind of object that the operator reads or writes, by name."""

from collections.abc import Mapping
from typing import Final

from mmrouter_operator.model.external_refs import EXTERNAL_KINDS
from mmrouter_operator.model.kinds import RESOURCE, Kind
from mmrouter_operator.render import CHILD_KINDS

KINDS: Final[Mapping[str, Kind]] = {
    **EXTERNAL_KINDS,
    **CHILD_KINDS,
    **{
        kind.kind: kind
        for kind in (
            Kind(RESOURCE, "mmrouter.io/v1alpha1"),
            Kind("Pod", "v1"),
            Kind("Lease", "coordination.k8s.io/v1"),
            Kind("Event", "events.k8s.io/v1"),
        )
    },
}

CORE_CHILDREN: Final = {name: kind for name, kind in CHILD_KINDS.items() if not kind.optional}
"""Children that exist in every cluster."""
OPTIONAL_CHILDREN: Final = {name: kind for name, kind in CHILD_KINDS.items() if kind.optional}
"""Children that exist only in clusters that serve their API."""
