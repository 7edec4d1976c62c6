"""The ConfigMap of a deployment: the resource itself, as every process reads it."""

import json
from typing import Any

from mmrouter_lib.api import MMRouterDeployment, to_json
from mmrouter_operator.render.common import config_name, object_metadata


def render_configmap(dep: MMRouterDeployment) -> dict[str, Any]:
    """Return the ConfigMap.

    Its name is fixed: the number of replicas is part of the resource, and a new name would restart every engine when it
    changes. What does need a restart is told by :mod:`mmrouter_operator.render.pod.template_inputs`.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": object_metadata(dep, config_name(dep), "config"),
        "data": {"deployment.json": json.dumps(to_json(dep), indent=2, sort_keys=True) + "\n"},
    }
