"""The ServiceAccounts of a deployment's pods: one that may read pods, one without any right."""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.render.child import ChildKind, RenderInputs, frontend_name, object_metadata

KIND: Final = ChildKind("ServiceAccount", "v1", wave=1, guard="creation", lifecycle="permanent")


def engine_account(dep: MMRouterDeployment) -> str:
    """Name of the engines' account. It has no right at all: it runs images that are not ours."""
    return f"{dep.metadata.name}-engine"


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return both accounts; the frontend's, whose pods watch the engine pods, has the frontend's name.

    Neither mounts its token by default. The frontend's pod template asks for it, so another pod that uses the account
    gets none. ``imagePullSecrets`` are left to other managers.
    """
    dep = inputs.dep
    accounts = ((frontend_name(dep), "frontend"), (engine_account(dep), "engine"))
    return [
        KIND.manifest(object_metadata(dep, name, component), automountServiceAccountToken=False)
        for name, component in accounts
    ]
