"""The ServiceAccounts of a deployment's pods: one that may read pods, one that may do nothing."""

from typing import Any

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.render.common import object_metadata


def frontend_account(dep: MMRouterDeployment) -> str:
    """Name of the frontend's account, whose pods watch the engine pods (:mod:`mmrouter_operator.render.role`)."""
    return f"{dep.metadata.name}-frontend"


def engine_account(dep: MMRouterDeployment) -> str:
    """Name of the engines' account. It has no right at all: an image that we did not build runs under it."""
    return f"{dep.metadata.name}-engine"


def render_serviceaccounts(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return both accounts.

    Neither hands out its token by itself. The frontend's pod template asks for it, so a pod that merely uses the
    account gets none. ``imagePullSecrets`` stay free for other managers.
    """
    return [_account(dep, frontend_account(dep), "frontend"), _account(dep, engine_account(dep), "engine")]


def _account(dep: MMRouterDeployment, name: str, component: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": object_metadata(dep, name, component),
        "automountServiceAccountToken": False,
    }
