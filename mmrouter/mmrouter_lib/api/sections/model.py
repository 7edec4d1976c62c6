"""`spec.model`: the weights to serve."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from mmrouter_lib.api.rules import VALIDATIONS, Resource, immutable, validation
from mmrouter_lib.api.shared_types import WORD, WORD_OR_EMPTY, Opaque, SecretKey

ONE_SOURCE = "name exactly one volume source, such as `persistentVolumeClaim` or `hostPath`"


def _one_source(value: dict[str, Any]) -> dict[str, Any]:
    if len(value) != 1 or "name" in value:
        raise ValueError(ONE_SOURCE)
    return value


Volume = Annotated[
    dict[Annotated[str, Field(max_length=63)], Opaque],
    Field(
        max_length=16,
        json_schema_extra={
            VALIDATIONS: [validation("size(self) == 1 && !('name' in self)", ONE_SOURCE)],
            "x-kubernetes-map-type": "atomic",
        },
    ),
    AfterValidator(_one_source),
]
"""A pod's volume source, in Kubernetes' format."""


class Model(Resource):
    """The model that every pool of the deployment serves."""

    id: Annotated[
        str,
        Field(
            min_length=1,
            max_length=500,
            pattern=WORD,
            json_schema_extra=immutable("model.id is immutable: create a second deployment and shift traffic"),
        ),
    ]
    """Hub repository of the weights, such as `Qwen/Qwen2.5-VL-7B-Instruct`. Immutable: new weights, new deployment."""
    revision: Annotated[str, Field(min_length=1, max_length=200, pattern=WORD)] = "main"
    """Branch, tag or commit. Pin a commit, so that pods that start at different times load the same model."""
    served_name: Annotated[str, Field(max_length=300, pattern=WORD_OR_EMPTY)] = ""
    """Value of `model` in requests. Default: the object's name."""
    volume: Volume | None = None
    """Pod volume source with the model's files, such as `persistentVolumeClaim: {claimName: weights}`; mounted
    read-only. Absent: the engine downloads from the hub."""
    token_secret: SecretKey | None = None
    """Hub access token, for repositories that are not public."""
    trust_remote_code: bool = False
    """Allow the engine to run Python code from the model's files."""
