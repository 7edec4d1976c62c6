"""ControllerRevisions: the pod templates of a deployment as they were rendered and applied."""

from collections.abc import Mapping
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.render.child import ChildKind, RenderInputs, object_metadata

KIND: Final = ChildKind("ControllerRevision", "apps/v1", wave=0, guard="removal")


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return nothing: :mod:`mmrouter_operator.planning.template_choice` decides when there is a new one."""
    return []


def revision(dep: MMRouterDeployment, number: int, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return one ControllerRevision. ``entries``: Deployment name -> its template and the hash of its inputs."""
    metadata = object_metadata(dep, f"{dep.metadata.name}-{number}", "revision")
    return KIND.manifest(metadata, revision=number, data={"deployments": dict(entries)})
