"""The SGLang adapter. How SGLang names images is in :mod:`mmrouter_lib.engines.sglang.identity`."""

from typing import Final

from mmrouter_lib.engines.base.adapter import EngineAdapter
from mmrouter_lib.engines.sglang.events import decode_batch
from mmrouter_lib.engines.sglang.metrics import METRICS, parse_block_size, parse_load
from mmrouter_lib.engines.sglang.request import REFUSED_FIELDS, REQUEST_ID_HEADER, prompt_error_field, rewrite_chat
from mmrouter_lib.engines.sglang.server_info import INFO_PATHS, parse_info

SGLANG: Final = EngineAdapter(
    type="sglang",
    # /health generates a token; /ready is cheap, and answers 503 while draining
    # (docs/engine-facts/sglang.md#http-endpoints).
    health_path="/ready",
    decode_batch=decode_batch,
    metrics=METRICS,
    parse_load=parse_load,
    parse_block_size=parse_block_size,
    info_paths=INFO_PATHS,
    parse_info=parse_info,
    rewrite_chat=rewrite_chat,
    prompt_error_field=prompt_error_field,
    refused_fields=REFUSED_FIELDS,
    request_id_header=REQUEST_ID_HEADER,
    divergent_fields={
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "reasoning_effort": None,
        "session_id": None,
    },
    normalizes_messages=True,
    learns_image_identity=True,
    asks_encoders_itself=True,
    pairs_prefill_and_decode=True,
    publishing_roles=frozenset({"worker", "prefill"}),
)
