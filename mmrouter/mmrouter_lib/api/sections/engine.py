"""`spec.engine`: the inference engine. Options that change prompts are typed, because the router applies them too."""

from typing import Annotated

from pydantic import Field, model_validator

from mmrouter_lib.api import owned_flags
from mmrouter_lib.api.engine_types import EngineType
from mmrouter_lib.api.rules import Resource, immutable, rule
from mmrouter_lib.api.shared_types import Argument, ConfigMapKey, Image, Opaque

BlockSize = Annotated[int, Field(ge=1, le=1024)]
Pixels = Annotated[int, Field(ge=1, le=1_000_000_000)]


class ChatTemplate(Resource):
    """Source of the chat template."""

    config_map: ConfigMapKey
    """ConfigMap key with the Jinja text."""


class ProcessorOptions(Resource):
    """Options of the image processor; they determine an image's token count and are part of its identity."""

    min_pixels: Pixels | None = None
    """Images with fewer pixels are scaled up to this many. Default: the model's own."""
    max_pixels: Pixels | None = None
    """Images with more pixels are scaled down to this many. Default: the model's own."""
    num_crops: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Phi-3-vision: maximum number of tiles per image. Default: the model's own."""

    @rule(
        "minPixels",
        "minPixels must not exceed maxPixels",
        "!has(self.minPixels) || !has(self.maxPixels) || self.minPixels <= self.maxPixels",
    )
    def _ordered(self) -> bool:
        return self.min_pixels is None or self.max_pixels is None or self.min_pixels <= self.max_pixels


class EngineSpec(Resource):
    """The inference engine, the same for every pool."""

    type: Annotated[
        EngineType,
        Field(json_schema_extra=immutable("engine.type is immutable: create a second deployment and shift traffic")),
    ]
    """vllm or sglang. Immutable: create a second deployment and shift traffic."""
    image: Image = ""
    """Container image of the unmodified engine. Default: by engine type and accelerator."""
    block_size: BlockSize | None = None
    """Tokens per KV block. Default: by accelerator; a pool may differ."""
    chat_template: ChatTemplate | None = None
    """Chat template for engines and router. Default: the one in the model's files."""
    processor: ProcessorOptions = ProcessorOptions()
    """Image processor options for engines and router."""
    kv_connector: Opaque = Field(default={})
    """Engine configuration of the transfer from prefill to decode. Default: by engine and accelerator. vllm: the JSON
    of `--kv-transfer-config`; sglang: `transferBackend` and `ibDevice`."""
    ec_connector: Opaque = Field(default={})
    """Engine configuration of the transfer from encoder to language model. Default: by engine and accelerator. vllm:
    the JSON of `--ec-transfer-config`; sglang: `transferBackend`."""
    args: list[Argument] = Field(default=[], max_length=64)
    """Additional engine arguments, for every pool. Arguments that have a field of their own are refused."""

    @model_validator(mode="after")
    def _own_flags(self) -> "EngineSpec":
        owned_flags.refuse_owned("args", self.args, self.type)
        return self

    @classmethod
    def validations(cls) -> list[dict[str, str]]:
        """Return the rules, with those for owned flags in ``args``."""
        return [*super().validations(), *owned_flags.engine_validations()]
