"""`spec.engine`: the inference engine. Options that change prompts are typed, because the router applies them too."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from mmrouter_lib.api import owned_flag_rules
from mmrouter_lib.api.cross_field_rules import VALIDATIONS, Resource, immutable, rule, validation
from mmrouter_lib.api.engine_traits import ENGINE_TYPES, EngineType, engine_is
from mmrouter_lib.api.shared_types import (
    WORD,
    WORD_OR_EMPTY,
    Argument,
    ConfigMapKey,
    Image,
    ObjectName,
    Opaque,
    SecretKey,
)

BlockSize = Annotated[int, Field(ge=1, le=1024)]
Pixels = Annotated[int, Field(ge=1, le=1_000_000_000)]


class ChatTemplate(Resource):
    """Source of the chat template."""

    config_map: ConfigMapKey
    """ConfigMap key with the Jinja text. A changed text restarts no pod, and pods keep the text that they started with:
    give a changed template another name."""


class ProcessorOptions(Resource):
    """Options of the image processor; they determine an image's token count and are part of its identity."""

    min_pixels: Pixels | None = None
    """Images with fewer pixels are scaled up to this many. Default: the model's own."""
    max_pixels: Pixels | None = None
    """Images with more pixels are scaled down to this many. Default: the model's own."""
    num_crops: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Phi-3-vision: maximum number of tiles per image. Default: the model's own."""

    @rule("minPixels", "!has(self.minPixels) || !has(self.maxPixels) || self.minPixels <= self.maxPixels")
    def _ordered(self) -> bool:
        """minPixels must not exceed maxPixels"""
        return self.min_pixels is None or self.max_pixels is None or self.min_pixels <= self.max_pixels


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


class EngineTls(Resource):
    """TLS on the engines' HTTP port."""

    secret_name: ObjectName
    """Secret with the engines' certificate (`tls.crt`), its key (`tls.key`) and the CA that routers and sidecars trust
    (`ca.crt`), as cert-manager makes it. The certificate is for the name `DEPLOYMENT-engine.NAMESPACE.svc`. Changes are
    loaded without a restart."""


TLS_STAYS = (
    "engine.tls cannot be changed or removed, because routers would not reach the engines that run: replace the "
    "content of its Secret, or create a second deployment"
)


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
    """Engine configuration of the transfer from encoder to language model. Default: one that works on all pools that
    encode or compute prompts; `mmrouter plan` shows it. vllm: the JSON of `--ec-transfer-config`; sglang:
    `transferBackend`."""
    embedding_volume: Volume | None = None
    """vllm: pod volume source for embeddings as files, such as a `persistentVolumeClaim` with ReadWriteMany. All pods
    that encode or compute prompts mount it at /var/lib/mmrouter/embeddings. Default where embeddings need a volume: a
    claim `NAME-embeddings`."""
    tls: EngineTls | None = None
    """TLS between routers and engines. Absent: plain HTTP. Once set, it cannot be changed or removed."""
    args: list[Argument] = Field(default=[], max_length=64)
    """Additional engine arguments, for every pool. Arguments that have a field of their own are refused. Write the
    names of flags in full: routers and operator read some of them."""

    @rule(
        "embeddingVolume",
        f"!has(self.embeddingVolume) || {engine_is(lambda traits: traits.embeddings_in_files, 'self.type')}",
    )
    def _volume_is_supported(self) -> bool:
        """embeddingVolume is for engine type vllm: SGLang's encoders send embeddings over the network"""
        return self.embedding_volume is None or ENGINE_TYPES[self.type].embeddings_in_files

    @model_validator(mode="after")
    def _own_flags(self) -> "EngineSpec":
        owned_flag_rules.refuse_owned("args", self.args, self.type)
        return self

    @classmethod
    def validations(cls) -> list[dict[str, str]]:
        """Return the rules, with those for owned flags in ``args`` and the one that compares with the stored object."""
        stays = validation("!has(oldSelf.tls) || (has(self.tls) && self.tls == oldSelf.tls)", TLS_STAYS, path="tls")
        return [*super().validations(), *owned_flag_rules.engine_validations(), stays]


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
