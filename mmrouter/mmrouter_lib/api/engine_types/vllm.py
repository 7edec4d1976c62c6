"""vLLM's part of the resource's rules: the flags that args must not set, and default block sizes."""

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
_NO_EMBEDS = "routers predict blocks from text and images only"
_ROLE = "a pool's role decides what its engines compute"
_TRANSFER = "engines find each other by the operator's wiring"
_RANKS = "routers and sidecars count the ranks of a pool"

OWNED_FLAGS = (
    OwnedFlag("--model", "model.id", _MODEL),
    OwnedFlag("--revision", "model.revision", _MODEL),
    OwnedFlag("--tokenizer", "", _TOKENIZER),
    OwnedFlag("--tokenizer-mode", "", _TOKENIZER),
    OwnedFlag("--tokenizer-revision", "model.revision", _TOKENIZER),
    OwnedFlag("--skip-tokenizer-init", "", _TOKENIZER),
    OwnedFlag("--served-model-name", "model.servedName", "routers answer under the same name"),
    OwnedFlag("--trust-remote-code", "model.trustRemoteCode", _MODEL),
    OwnedFlag("--hf-token", "model.tokenSecret", "the operator mounts the token"),
    OwnedFlag("--config", "engine.args", "a file of flags would hide flags from this check"),
    OwnedFlag("--host", "", _LISTENER),
    OwnedFlag("--port", "", _LISTENER),
    OwnedFlag("--uds", "", _LISTENER),
    OwnedFlag("--root-path", "", _LISTENER),
    OwnedFlag("--ssl-keyfile", "", _LISTENER),
    OwnedFlag("--ssl-certfile", "", _LISTENER),
    OwnedFlag("--api-key", "", _KEY),
    OwnedFlag("--headless", "", _API),
    OwnedFlag("--grpc", "", _API),
    OwnedFlag("--block-size", "engine.blockSize", _BLOCKS),
    OwnedFlag("--enable-prefix-caching", "", _BLOCKS),
    OwnedFlag("--prefix-caching-hash-algo", "", _BLOCKS),
    OwnedFlag("--kv-events-config", "", _EVENTS),
    OwnedFlag("--enable-prompt-tokens-details", "", _USAGE),
    OwnedFlag("--chat-template", "engine.chatTemplate", _TEMPLATE),
    OwnedFlag("--chat-template-content-format", "", _TEMPLATE),
    OwnedFlag("--trust-request-chat-template", "", _TEMPLATE),
    OwnedFlag("--default-chat-template-kwargs", "", _TEMPLATE),
    OwnedFlag("--interleave-mm-strings", "", _TEMPLATE),
    OwnedFlag("--exclude-tools-when-tool-choice-none", "", _TEMPLATE),
    OwnedFlag("--mm-processor-kwargs", "engine.processor", _PROCESSOR),
    OwnedFlag("--media-io-kwargs", "", _PROCESSOR),
    OwnedFlag("--enable-tower-connector-lora", "", _NO_EMBEDS),
    OwnedFlag("--enable-prompt-embeds", "", _NO_EMBEDS),
    OwnedFlag("--enable-mm-embeds", "", _NO_EMBEDS),
    OwnedFlag("--limit-mm-per-prompt", "routing.media.maxImages", "routers refuse requests with more images"),
    OwnedFlag("--allowed-local-media-path", "routing.transfer", "engines read only the files that routers share"),
    OwnedFlag("--mm-encoder-only", "pools[].role", _ROLE),
    OwnedFlag("--kv-transfer-config", "engine.kvConnector", _TRANSFER),
    OwnedFlag("--ec-transfer-config", "engine.ecConnector", _TRANSFER),
    OwnedFlag("--shutdown-timeout", "pools[].updates.drainSeconds", "the pod's grace period follows the drain time"),
    OwnedFlag("--tensor-parallel-size", "pools[].parallelism.tensor", _RANKS),
    OwnedFlag("-tp", "pools[].parallelism.tensor", _RANKS),
    OwnedFlag("--data-parallel-size", "pools[].parallelism.data", _RANKS),
    OwnedFlag("-dp", "pools[].parallelism.data", _RANKS),
    OwnedFlag("--data-parallel-rank", "", _RANKS),
    OwnedFlag("-dpn", "", _RANKS),
    OwnedFlag("--data-parallel-start-rank", "", _RANKS),
    OwnedFlag("-dpr", "", _RANKS),
    OwnedFlag("--data-parallel-size-local", "", _RANKS),
    OwnedFlag("-dpl", "", _RANKS),
    OwnedFlag("--data-parallel-hybrid-lb", "", _RANKS),
    OwnedFlag("-dph", "", _RANKS),
    OwnedFlag("--data-parallel-external-lb", "", _RANKS),
    OwnedFlag("-dpe", "", _RANKS),
    OwnedFlag("--data-parallel-multi-port-external-lb", "", _RANKS),
    OwnedFlag("-dpm", "", _RANKS),
)
"""vLLM takes each with underscores, ``=value``, a dotted suffix (``--kv-events-config.endpoint``), ``--no-`` and
shortened."""

VLLM = EngineTraits(
    type="vllm",
    owned_flags=OWNED_FLAGS,
    # vLLM's own defaults per platform.
    default_block_sizes={"nvidia": 16, "amd": 16, "intel-i915": 64, "intel-xe": 64, "gaudi": 128, "cpu": 128},
    has_renderers=True,
    supports_transfer=True,
)
