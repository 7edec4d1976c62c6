"""vLLM's part of the resource's rules: the flags that args must not set, and default block sizes."""

from mmrouter_lib.api.engine_types.base import EngineTraits, owned

_MODEL = "routers and engines read the same model files"
_TOKENIZER = "routers tokenize prompts themselves, with the model's own tokenizer"
_BLOCKS = "routers predict block keys from it"
_TEMPLATE = "routers render prompts with the same template"
_PROCESSOR = "routers count image tokens with the same options"
_TRANSFER = "engines find each other by the operator's wiring"
_RANKS = "routers and sidecars count the ranks of a pool"

OWNED_FLAGS = (
    *owned(_MODEL, "model.id", "--model"),
    *owned(_MODEL, "model.revision", "--revision"),
    *owned(_TOKENIZER, None, "--tokenizer --tokenizer-mode --skip-tokenizer-init"),
    *owned(_TOKENIZER, "model.revision", "--tokenizer-revision"),
    *owned("routers answer under the same name", "model.servedName", "--served-model-name"),
    *owned(_MODEL, "model.trustRemoteCode", "--trust-remote-code"),
    *owned("the operator mounts the token", "model.tokenSecret", "--hf-token"),
    *owned("a file of flags would hide flags from this check", "engine.args", "--config"),
    *owned(
        "routers and probes reach the engine at its pod's address and the port of every engine",
        None,
        "--host --port --uds --root-path --ssl-keyfile --ssl-certfile",
    ),
    *owned("the operator makes one key for engines and routers", None, "--api-key"),
    *owned("routers speak HTTP with the engine's OpenAI server", None, "--headless --grpc"),
    *owned(_BLOCKS, "engine.blockSize", "--block-size"),
    *owned(_BLOCKS, None, "--enable-prefix-caching --prefix-caching-hash-algo"),
    *owned("the sidecar reads the engine's events", None, "--kv-events-config"),
    *owned(
        "routers verify predictions by the cached tokens that answers report", None, " --enable-prompt-tokens-details"
    ),
    *owned(_TEMPLATE, "engine.chatTemplate", "--chat-template"),
    *owned(
        _TEMPLATE,
        None,
        "--chat-template-content-format --trust-request-chat-template "
        "--default-chat-template-kwargs --interleave-mm-strings --exclude-tools-when-tool-choice-none",
    ),
    *owned(_PROCESSOR, "engine.processor", "--mm-processor-kwargs"),
    *owned(_PROCESSOR, None, "--media-io-kwargs"),
    *owned(
        "routers predict blocks from text and images only",
        None,
        "--enable-tower-connector-lora --enable-prompt-embeds --enable-mm-embeds",
    ),
    *owned("routers refuse requests with more images", "routing.media.maxImages", "--limit-mm-per-prompt"),
    *owned("engines read only the files that routers share", "routing.transfer", "--allowed-local-media-path"),
    *owned("a pool's role decides what its engines compute", "pools[].role", "--mm-encoder-only"),
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
    owned_flags=OWNED_FLAGS,
    # vLLM's own defaults per platform.
    default_block_sizes={"nvidia": 16, "amd": 16, "intel-i915": 64, "intel-xe": 64, "gaudi": 128, "cpu": 128},
    has_renderers=True,
    supports_transfer=True,
)
