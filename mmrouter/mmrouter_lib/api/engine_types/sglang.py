"""SGLang's part of the resource's rules: the flags that args must not set, and default page sizes."""

from mmrouter_lib.api.engine_types.base import EngineTraits, owned

_MODEL = "routers and engines read the same model files"
_BLOCKS = "routers predict block keys from it"
_TEMPLATE = "routers render prompts with the same template"
_ROLE = "a pool's role decides what its engines compute"
_TRANSFER = "engines find each other by the operator's wiring"
_RANKS = "routers and sidecars count the ranks of a pool"

OWNED_FLAGS = (
    *owned(_MODEL, "model.id", "--model-path --model"),
    *owned("the operator says it, so that the engine looks no type up", None, "--model-type"),
    *owned(_MODEL, "model.revision", "--revision"),
    *owned(
        "routers tokenize prompts themselves, with the model's own tokenizer",
        None,
        "--tokenizer-path --tokenizer-mode --skip-tokenizer-init",
    ),
    *owned("several tokenizer processes check no API key", None, "--tokenizer-worker-num"),
    *owned("routers answer under the same name", "model.servedName", "--served-model-name"),
    *owned(_MODEL, "model.trustRemoteCode", "--trust-remote-code"),
    *owned("a file of flags would hide flags from this check", "engine.args", "--config"),
    *owned(
        "routers and probes reach the engine at its pod's address and the port of every engine",
        None,
        "--host --port --fastapi-root-path --ssl-keyfile --ssl-certfile",
    ),
    *owned("the operator makes one key for engines and routers", None, "--api-key --admin-api-key"),
    *owned("routers speak HTTP with the engine's OpenAI server", None, "--grpc-mode --smg-grpc-mode"),
    *owned(_BLOCKS, "engine.blockSize", "--page-size"),
    *owned(_BLOCKS, None, "--disable-radix-cache --enable-session-radix-cache"),
    *owned("the sidecar reads the engine's events", None, "--kv-events-config"),
    *owned("the sidecar reads the engine's load", None, "--enable-metrics"),
    *owned("routers verify predictions by the cached tokens that answers report", None, "--enable-cache-report"),
    *owned(_TEMPLATE, "engine.chatTemplate", "--chat-template --hf-chat-template-name"),
    *owned(_TEMPLATE, None, "--trust-request-chat-template --default-chat-template-kwargs"),
    *owned("routers predict blocks from whole prompts", None, "--allow-auto-truncate"),
    *owned("routers count image tokens with the same options", "engine.processor", "--mm-process-config"),
    *owned("clients could name the pixels of other tenants", None, "--trust-mm-content-hashes"),
    *owned("routers refuse requests with more images", "routing.media.maxImages", "--limit-mm-data-per-request"),
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
