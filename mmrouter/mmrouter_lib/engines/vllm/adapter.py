"""The vLLM adapter: everything about vLLM that the rest of the project uses, in one import.

``decode_batch`` reads its events, ``rewrite_chat`` makes its requests, ``parse_load`` reads its metrics, ``launch``
makes its command line. Facts about vLLM stand in these files and nowhere else.
"""

from mmrouter_lib.engines.base.events import EventError
from mmrouter_lib.engines.base.launch import EVENTS_PORT, HTTP_PORT, REPLAY_PORT, Launch
from mmrouter_lib.engines.vllm.connectors import KV_EXACT_BLOCK_SIZE, KV_EXACT_FLAGS
from mmrouter_lib.engines.vllm.events import IGNORED_REASONS, decode_batch
from mmrouter_lib.engines.vllm.launch import API_KEY_ENV, KV_LAYOUT_FLAGS, OWNED_FLAGS, launch
from mmrouter_lib.engines.vllm.metrics import METRICS, Load, parse_block_size, parse_load
from mmrouter_lib.engines.vllm.request import (
    REFUSED_FIELDS,
    REFUSED_XARGS,
    ImageRewrite,
    Rewritten,
    prompt_error_field,
    rewrite_chat,
)

FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "phi3_v"})
"""Model types whose prompts are proved to be this engine's, block by block (docs/conformance.md)."""

HEALTH_PATH = "/health"

__all__ = [
    "API_KEY_ENV",
    "EVENTS_PORT",
    "FAMILIES",
    "HEALTH_PATH",
    "HTTP_PORT",
    "IGNORED_REASONS",
    "KV_EXACT_BLOCK_SIZE",
    "KV_EXACT_FLAGS",
    "KV_LAYOUT_FLAGS",
    "METRICS",
    "OWNED_FLAGS",
    "REFUSED_FIELDS",
    "REFUSED_XARGS",
    "REPLAY_PORT",
    "EventError",
    "ImageRewrite",
    "Launch",
    "Load",
    "Rewritten",
    "decode_batch",
    "launch",
    "parse_block_size",
    "parse_load",
    "prompt_error_field",
    "rewrite_chat",
]
