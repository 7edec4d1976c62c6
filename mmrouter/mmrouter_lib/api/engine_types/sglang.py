"""SGLang's part of the resource's rules: the flags that args must not set, and default page sizes."""

from mmrouter_lib.api.engine_types.base import EngineTraits, OwnedFlag

_MODEL = "routers and engines read the same model files"
_TOKENIZER = "routers tokenize prompts themselves, with the model's own tokenizer"
_LISTENER = "routers and probes reach the engine at its pod's address and the port of every engine"
_KEY = "the operator makes one key for engines and routers"
_API = "routers speak HTTP with the engine's OpenAI server"
_BLOCKS = "routers predict block keys from it"
_EVENTS = "the sidecar reads the engine's events"
_USAGE = "routers verify predictions by the cached tokens that answers report"
_TEMPLATE = "routers render prompts with the same template"
_PROCESSOR = "routers count image tokens with the same options"
_ROLE = "a pool's role decides what its engines compute"
_TRANSFER = "engines find each other by the operator's wiring"
_RANKS = "routers and sidecars count the ranks of a pool"

OWNED_FLAGS = (
    OwnedFlag("--model-path", "model.id", _MODEL),
    OwnedFlag("--model", "model.id", _MODEL),
    OwnedFlag("--model-type", "", "the operator says it, so that the engine looks no type up"),
    OwnedFlag("--revision", "model.revision", _MODEL),
    OwnedFlag("--tokenizer-path", "", _TOKENIZER),
    OwnedFlag("--tokenizer-mode", "", _TOKENIZER),
    OwnedFlag("--tokenizer-worker-num", "", "several tokenizer processes check no API key"),
    OwnedFlag("--skip-tokenizer-init", "", _TOKENIZER),
    OwnedFlag("--served-model-name", "model.servedName", "routers answer under the same name"),
    OwnedFlag("--trust-remote-code", "model.trustRemoteCode", _MODEL),
    OwnedFlag("--config", "engine.args", "a file of flags would hide flags from this check"),
    OwnedFlag("--host", "", _LISTENER),
    OwnedFlag("--port", "", _LISTENER),
    OwnedFlag("--fastapi-root-path", "", _LISTENER),
    OwnedFlag("--ssl-keyfile", "", _LISTENER),
    OwnedFlag("--ssl-certfile", "", _LISTENER),
    OwnedFlag("--api-key", "", _KEY),
    OwnedFlag("--admin-api-key", "", _KEY),
    OwnedFlag("--grpc-mode", "", _API),
    OwnedFlag("--smg-grpc-mode", "", _API),
    OwnedFlag("--page-size", "engine.blockSize", _BLOCKS),
    OwnedFlag("--disable-radix-cache", "", _BLOCKS),
    OwnedFlag("--enable-session-radix-cache", "", _BLOCKS),
    OwnedFlag("--kv-events-config", "", _EVENTS),
    OwnedFlag("--enable-metrics", "", "the sidecar reads the engine's load"),
    OwnedFlag("--enable-cache-report", "", _USAGE),
    OwnedFlag("--chat-template", "engine.chatTemplate", _TEMPLATE),
    OwnedFlag("--hf-chat-template-name", "engine.chatTemplate", _TEMPLATE),
    OwnedFlag("--trust-request-chat-template", "", _TEMPLATE),
    OwnedFlag("--default-chat-template-kwargs", "", _TEMPLATE),
    OwnedFlag("--allow-auto-truncate", "", "routers predict blocks from whole prompts"),
    OwnedFlag("--mm-process-config", "engine.processor", _PROCESSOR),
    OwnedFlag("--trust-mm-content-hashes", "", "clients could name the pixels of other tenants"),
    OwnedFlag("--limit-mm-data-per-request", "routing.media.maxImages", "routers refuse requests with more images"),
    OwnedFlag("--encoder-only", "pools[].role", _ROLE),
    OwnedFlag("--language-only", "pools[].role", _ROLE),
    OwnedFlag("--language-model-only", "", _ROLE),
    OwnedFlag("--encoder-transfer-backend", "engine.ecConnector", _TRANSFER),
    OwnedFlag("--encoder-urls", "", _TRANSFER),
    OwnedFlag("--encoder-register-urls", "", _TRANSFER),
    OwnedFlag("--encoder-bootstrap-port", "", _TRANSFER),
    OwnedFlag("--enable-prefix-mm-cache", "", "encoders keep embeddings for the language engines"),
    OwnedFlag("--enable-adaptive-dispatch-to-encoder", "", "encoders encode all images"),
    OwnedFlag("--disaggregation-mode", "pools[].role", _ROLE),
    OwnedFlag("--disaggregation-transfer-backend", "engine.kvConnector", _TRANSFER),
    OwnedFlag("--disaggregation-ib-device", "engine.kvConnector", _TRANSFER),
    OwnedFlag("--disaggregation-bootstrap-port", "", _TRANSFER),
    OwnedFlag("--tensor-parallel-size", "pools[].parallelism.tensor", _RANKS),
    OwnedFlag("--tp-size", "pools[].parallelism.tensor", _RANKS),
    OwnedFlag("--tp", "pools[].parallelism.tensor", _RANKS),
    OwnedFlag("--data-parallel-size", "pools[].parallelism.data", _RANKS),
    OwnedFlag("--dp-size", "pools[].parallelism.data", _RANKS),
    OwnedFlag("--dp", "pools[].parallelism.data", _RANKS),
    OwnedFlag("--decode-context-parallel-size", "", "it multiplies the block size"),
    OwnedFlag("--dcp-size", "", "it multiplies the block size"),
)
"""``--mm-preprocess-cache-size-mb`` is not owned: users may raise it, or set it for a model whose name does not show
that it is a Qwen-VL; the sidecar reads the resulting value from the engine."""

SGLANG = EngineTraits(
    type="sglang",
    owned_flags=OWNED_FLAGS,
    # SGLang's own default is 1, a hash for every token. 16 is the smallest page of its CUDA attention backends, 64 of
    # those for XPU.
    default_block_sizes={"nvidia": 16, "amd": 16, "intel-i915": 64, "intel-xe": 64, "gaudi": 64, "cpu": 16},
    has_renderers=False,
    supports_transfer=False,
)
