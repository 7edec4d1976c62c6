"""`spec.model`: which weights are served."""

from typing import Annotated

from pydantic import Field, model_validator

from mmrouter.api.base import Opaque, Resource, SecretKey, broken


class Model(Resource):
    """The model that every pool of the deployment serves."""

    id: Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\s]+$")]
    """Hub repository of the weights, `Qwen/Qwen2.5-VL-7B-Instruct` for one. Immutable: new weights, new deployment."""
    revision: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\s]+$")] = "main"
    """Branch, tag or commit. Pin a commit: pods that start at different times must see the same model."""
    served_name: Annotated[str, Field(max_length=300, pattern=r"^([^\s]+)?$")] = ""
    """Name that clients write into `model`. Default: the object's name."""
    volume: Opaque | None = None
    """Pod volume source with the model's files, such as `persistentVolumeClaim: {claimName: weights}`; mounted
    read-only. Absent: the engine downloads from the hub."""
    token_secret: SecretKey | None = None
    """Hub access token, for repositories that are not public."""
    trust_remote_code: bool = False
    """Let the engine run Python code that comes with the model's files."""

    @model_validator(mode="after")
    def _one_source(self) -> "Model":
        if self.volume is not None and len(self.volume) != 1:
            raise broken("volume", "name exactly one volume source, such as `persistentVolumeClaim` or `hostPath`")
        return self
