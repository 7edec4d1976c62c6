"""The volume of embeddings, where pools hand them over by files and the resource names no volume.

Its contents are a cache. It is one claim that every pod mounts, on any node, so its class must offer ReadWriteMany.
"""

from typing import Any, Final

from mmrouter_operator.render.child import ChildKind, RenderInputs, object_metadata
from mmrouter_operator.render.pod import embedding_volume

KIND: Final = ChildKind("PersistentVolumeClaim", "v1", wave=1, guard="creation", local=True, fixed=True)


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the claim, of the cluster's default class; none where it is not needed."""
    if not embedding_volume.is_claimed(inputs.dep):
        return []
    metadata = object_metadata(inputs.dep, embedding_volume.claim_name(inputs.dep), "engine")
    storage = {"requests": {"storage": embedding_volume.CLAIMED}}
    return [KIND.manifest(metadata, spec={"accessModes": ["ReadWriteMany"], "resources": storage})]
