"""The SGLang adapter: everything about SGLang that the rest of the project uses, in one import.

``decode_batch`` reads its events, ``rewrite_chat`` makes its requests, ``parse_load`` reads its metrics, ``launch``
makes its command line. How it names images is in :mod:`mmrouter_lib.engines.sglang.identity`. Facts about SGLang
stand in
these files and nowhere else.
"""

from mmrouter_lib.engines.base.events import EventError
from mmrouter_lib.engines.base.launch import EVENTS_PORT, HTTP_PORT, REPLAY_PORT, Launch
from mmrouter_lib.engines.sglang.disaggregation import KV_EXACT_BLOCK_SIZE, KV_EXACT_FLAGS
from mmrouter_lib.engines.sglang.events import IGNORED_REASONS, decode_batch
from mmrouter_lib.engines.sglang.launch import API_KEY_ENV, KV_LAYOUT_FLAGS, OWNED_FLAGS, launch
from mmrouter_lib.engines.sglang.metrics import METRICS, parse_block_size, parse_load
from mmrouter_lib.engines.sglang.request import (
    REFUSED_FIELDS,
    REFUSED_HEADER_PREFIX,
    REFUSED_PART_FIELDS,
    REQUEST_ID_HEADER,
    prompt_error_field,
    rewrite_chat,
)
from mmrouter_lib.engines.sglang.server_info import INFO_PATH, EngineInfo, parse_info
from mmrouter_lib.engines.vllm.metrics import Load
from mmrouter_lib.engines.vllm.request import ImageRewrite, Rewritten

FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Model types whose prompts are proved to be this engine's, block by block (docs/conformance.md). It serves others,
too, but expands some of them, LLaVA among them, by code of its own in its scheduler
(docs/engine-facts/sglang.md#identity-per-family)."""

HEALTH_PATH = "/ready"
"""What a probe asks: cheap, unlike ``/health``, and 503 while draining (docs/engine-facts/sglang.md#http-endpoints)."""

__all__ = [
    "API_KEY_ENV",
    "EVENTS_PORT",
    "FAMILIES",
    "HEALTH_PATH",
    "HTTP_PORT",
    "IGNORED_REASONS",
    "INFO_PATH",
    "KV_EXACT_BLOCK_SIZE",
    "KV_EXACT_FLAGS",
    "KV_LAYOUT_FLAGS",
    "METRICS",
    "OWNED_FLAGS",
    "REFUSED_FIELDS",
    "REFUSED_HEADER_PREFIX",
    "REFUSED_PART_FIELDS",
    "REPLAY_PORT",
    "REQUEST_ID_HEADER",
    "EngineInfo",
    "EventError",
    "ImageRewrite",
    "Launch",
    "Load",
    "Rewritten",
    "decode_batch",
    "launch",
    "parse_block_size",
    "parse_info",
    "parse_load",
    "prompt_error_field",
    "rewrite_chat",
]
