"""The ConfigMap of a deployment: the resource itself, as every process reads it."""

import json
from typing import Any, Final

from mmrouter_lib.api import to_json
from mmrouter_operator.render.child import ChildKind, RenderInputs, config_name, object_metadata

KIND: Final = ChildKind("ConfigMap", "v1", wave=1, guard="removal", local=True, lifecycle="permanent")


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the one ConfigMap.

    Its name is fixed: the number of replicas is part of the resource, and a new name would restart every engine when it
    changes. :mod:`mmrouter_operator.render.pod.spec_hashes` decides which changes restart pods.
    """
    data = {"deployment.json": json.dumps(to_json(inputs.dep), indent=2, sort_keys=True) + "\n"}
    return [KIND.manifest(object_metadata(inputs.dep, config_name(inputs.dep), "config"), data=data)]
