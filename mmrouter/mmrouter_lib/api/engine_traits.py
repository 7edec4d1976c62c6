"""The engine types of the resource, each with what its validation needs: owned flags, block sizes, supported roles."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from mmrouter_lib.api.shared_types import AcceleratorKind

EngineType = Literal["vllm", "sglang"]


class OwnedFlag(NamedTuple):
    """An engine flag that ``engine.args`` and ``pools[].args`` must not set."""

    name: str
    field: str | None  # field of spec to use instead
    why: str


def owned(why: str, field: str | None, names: str) -> Iterator[OwnedFlag]:
    """Yield the flags in ``names``, separated by blanks."""
    for name in names.split():
        yield OwnedFlag(name, field, why)


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """One engine type, as the resource's validation sees it."""

    type: EngineType
    owned_flags: tuple[OwnedFlag, ...]
    default_block_sizes: Mapping[AcceleratorKind, int]  # tokens per KV block where neither pool nor engine sets them
    has_renderers: bool  # whether pools of role renderer exist for it
    supports_transfer: bool  # whether routing.transfer may be other than none
    embeddings_in_files: bool  # whether encoders can hand embeddings over in files of engine.embeddingVolume
    encoders_serve_tls: bool  # whether engine.tls encrypts the connections to encoders


# Why args must not set a flag.
_MODEL = "routers and engines read the same model files"
_BLOCKS = "routers predict block keys from it"
_TEMPLATE = "routers render prompts with the same template"
_TRANSFER = "engines find each other by the operator's wiring"
_RANKS = "routers and sidecars count the ranks of a pool"
_TOKENIZER = "routers tokenize prompts themselves, with the model's own tokenizer"
_ADDRESS = "routers and probes reach the engine at its pod's address and the port of every engine"
_TLS = "routers trust the certificates of one Secret"
_PROMPTS = "routers predict blocks from text and images only"
_CACHED = "routers verify predictions by the cached tokens that answers report"
_PROCESSOR = "routers count image tokens with the same options"
_ROLE = "a pool's role decides what its engines compute"
_FILE = "a file of flags would hide flags from this check"
_NAME = "routers answer under the same name"
_EVENTS = "the sidecar reads the engine's events"
_SERVER = "routers speak HTTP with the engine's OpenAI server"
_IMAGES = "routers refuse requests with more images"

VLLM_FLAGS = (
    *owned(_MODEL, "model.id", "--model"),
    *owned(_MODEL, "model.revision", "--revision"),
    *owned(_TOKENIZER, None, "--tokenizer --tokenizer-mode --skip-tokenizer-init"),
    *owned(_TOKENIZER, "model.revision", "--tokenizer-revision"),
    *owned(_NAME, "model.servedName", "--served-model-name"),
    *owned(_MODEL, "model.trustRemoteCode", "--trust-remote-code"),
    *owned("the operator mounts the token", "model.tokenSecret", "--hf-token"),
    *owned(_FILE, "engine.args", "--config"),
    *owned(_ADDRESS, None, "--host --port --uds --root-path"),
    *owned(_TLS, "engine.tls", "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs"),
    *owned(_TLS, "engine.tls", "--enable-ssl-refresh"),
    *owned("the operator makes one key for engines and routers", None, "--api-key"),
    *owned(_SERVER, None, "--headless --grpc"),
    *owned(_BLOCKS, "engine.blockSize", "--block-size"),
    *owned(_BLOCKS, None, "--enable-prefix-caching --prefix-caching-hash-algo"),
    *owned(_EVENTS, None, "--kv-events-config"),
    *owned(_CACHED, None, "--enable-prompt-tokens-details"),
    *owned(_TEMPLATE, "engine.chatTemplate", "--chat-template"),
    *owned(
        _TEMPLATE,
        None,
        "--chat-template-content-format --trust-request-chat-template "
        "--default-chat-template-kwargs --interleave-mm-strings --exclude-tools-when-tool-choice-none",
    ),
    *owned(_PROCESSOR, "engine.processor", "--mm-processor-kwargs"),
    *owned(_PROCESSOR, None, "--media-io-kwargs --video-pruning-rate --video-pruning-method"),
    *owned(_PROMPTS, None, "--enable-tower-connector-lora --enable-prompt-embeds --enable-mm-embeds"),
    *owned("clients name the adapter that answers", None, "--default-mm-loras"),
    *owned(_IMAGES, "routing.media.maxImages", "--limit-mm-per-prompt"),
    *owned("engines read only the files that routers share", "routing.transfer", "--allowed-local-media-path"),
    *owned(_ROLE, "pools[].role", "--mm-encoder-only"),
    *owned("routers continue streams by the endpoints that it opens", None, "--enable-scale-out"),
    *owned(_TRANSFER, "engine.kvConnector", "--kv-transfer-config"),
    *owned(_TRANSFER, "engine.ecConnector", "--ec-transfer-config"),
    *owned("the pod's grace period follows the drain time", "pools[].updates.drainSeconds", "--shutdown-timeout"),
    *owned(_RANKS, "pools[].parallelism.tensor", "--tensor-parallel-size -tp"),
    *owned(_RANKS, "pools[].parallelism.data", "--data-parallel-size -dp"),
    *owned(
        _RANKS,
        None,
        "--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-size-local -dpl "
        "--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm",
    ),
)
"""vLLM takes each with underscores, ``=value``, a dotted suffix (``--kv-events-config.endpoint``), ``--no-`` and
shortened."""

VLLM = EngineTraits(
    type="vllm",
    owned_flags=VLLM_FLAGS,
    # vLLM's own defaults per platform.
    default_block_sizes={"nvidia": 16, "amd": 16, "intel-i915": 64, "intel-xe": 64, "gaudi": 128, "cpu": 128},
    has_renderers=True,
    supports_transfer=True,
    embeddings_in_files=True,
    encoders_serve_tls=True,
)

SGLANG_FLAGS = (
    *owned(_MODEL, "model.id", "--model-path --model"),
    *owned("the operator says it, so that the engine looks no type up", None, "--model-type"),
    *owned(_MODEL, "model.revision", "--revision"),
    *owned(_TOKENIZER, None, "--tokenizer-path --tokenizer-mode --skip-tokenizer-init"),
    *owned("several tokenizer processes check no API key", None, "--tokenizer-worker-num"),
    *owned(_NAME, "model.servedName", "--served-model-name"),
    *owned(_MODEL, "model.trustRemoteCode", "--trust-remote-code"),
    *owned(_FILE, "engine.args", "--config"),
    *owned(_ADDRESS, None, "--host --port --fastapi-root-path"),
    *owned(_TLS, "engine.tls", "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-keyfile-password"),
    *owned(_TLS, "engine.tls", "--enable-ssl-refresh --enable-http2"),
    *owned("the operator makes one key for engines and routers", None, "--api-key --admin-api-key"),
    *owned(_SERVER, None, "--grpc-mode --smg-grpc-mode"),
    *owned(_BLOCKS, "engine.blockSize", "--page-size"),
    *owned(_BLOCKS, None, "--disable-radix-cache --enable-session-radix-cache"),
    *owned(_EVENTS, None, "--kv-events-config"),
    *owned("the sidecar reads the engine's load", None, "--enable-metrics"),
    *owned(_CACHED, None, "--enable-cache-report"),
    *owned(_TEMPLATE, "engine.chatTemplate", "--chat-template --hf-chat-template-name"),
    *owned(_TEMPLATE, None, "--trust-request-chat-template --default-chat-template-kwargs"),
    *owned("routers predict the prompt of a completion as the client wrote it", None, "--completion-template"),
    *owned("routers predict blocks from whole prompts", None, "--allow-auto-truncate"),
    *owned(_PROCESSOR, "engine.processor", "--mm-process-config"),
    *owned("clients could name the pixels of other tenants", None, "--trust-mm-content-hashes"),
    *owned(_IMAGES, "routing.media.maxImages", "--limit-mm-data-per-request"),
    *owned(_ROLE, "pools[].role", "--encoder-only --language-only --disaggregation-mode"),
    *owned(_ROLE, None, "--language-model-only"),
    *owned(_TRANSFER, "engine.ecConnector", "--encoder-transfer-backend"),
    *owned(
        _TRANSFER,
        None,
        "--encoder-urls --encoder-register-urls --encoder-bootstrap-port --disaggregation-bootstrap-port",
    ),
    *owned("encoders keep embeddings for the language engines", None, "--enable-prefix-mm-cache"),
    *owned("encoders encode all images", None, "--enable-adaptive-dispatch-to-encoder"),
    *owned(_TRANSFER, "engine.kvConnector", "--disaggregation-transfer-backend --disaggregation-ib-device"),
    *owned(_RANKS, "pools[].parallelism.tensor", "--tensor-parallel-size --tp-size --tp"),
    *owned(_RANKS, "pools[].parallelism.data", "--data-parallel-size --dp-size --dp"),
    *owned("it multiplies the block size", None, "--decode-context-parallel-size --dcp-size"),
    *owned("an adapter that is loaded again has lost its blocks", None, "--max-loaded-loras"),
)
"""``--mm-preprocess-cache-size-mb`` is not owned: users may raise it, or set it for a model whose name does not show
its family; the sidecar reads the resulting value from the engine."""

SGLANG = EngineTraits(
    type="sglang",
    owned_flags=SGLANG_FLAGS,
    # SGLang's own default is 1, a hash for every token. 16 is the smallest page of its CUDA attention backends, 64 of
    # those for XPU.
    default_block_sizes={"nvidia": 16, "amd": 16, "intel-i915": 64, "intel-xe": 64, "gaudi": 64, "cpu": 16},
    has_renderers=False,
    supports_transfer=False,
    embeddings_in_files=False,
    encoders_serve_tls=False,
)

ENGINE_TYPES: Final[Mapping[EngineType, EngineTraits]] = {traits.type: traits for traits in (VLLM, SGLANG)}


def engine_is(able: Callable[[EngineTraits], bool], field: str = "self.engine.type") -> str:
    """Return CEL for: the engine type in ``field`` has a trait."""
    return " || ".join(f"{field} == '{traits.type}'" for traits in ENGINE_TYPES.values() if able(traits))
