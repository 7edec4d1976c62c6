"""The vLLM adapter: everything about vLLM that the rest of the project uses, in one import.

``decode_batch`` reads its events, ``rewrite_chat`` makes its requests, ``parse_load`` reads its metrics, ``launch``
makes its command line. Facts about vLLM stand in these files and nowhere else.
"""

from mmrouter.engines.events import EventError
from mmrouter.engines.launching import EVENTS_PORT, HTTP_PORT, REPLAY_PORT, Launch
from mmrouter.engines.vllm_events import IGNORED_REASONS, decode_batch
from mmrouter.engines.vllm_launch import API_KEY_ENV, OWNED_FLAGS, launch
from mmrouter.engines.vllm_metrics import METRICS, Load, parse_block_size, parse_load
from mmrouter.engines.vllm_request import (
    REFUSED_FIELDS,
    REFUSED_XARGS,
    ImageRewrite,
    Rewritten,
    prompt_error_field,
    rewrite_chat,
)

HEALTH_PATH = "/health"

__all__ = [
    "API_KEY_ENV",
    "EVENTS_PORT",
    "HEALTH_PATH",
    "HTTP_PORT",
    "IGNORED_REASONS",
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
