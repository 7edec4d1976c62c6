"""Routes that routers pass on to an engine that serves them: their bodies are checked, their prompts not predicted.

An engine's own list of routes decides which of them a deployment serves (``/openapi.json``, read at its start).
"""

from collections.abc import Mapping
from typing import Final

from mmrouter_lib.engines.base.request_fields import words

TOKENIZE: Final = "/tokenize"
DETOKENIZE: Final = "/detokenize"
GENERATE: Final = "/generate"
TRANSCRIBE: Final = "/v1/audio/transcriptions"  # the only one whose body is a form
ROUTES_PATH: Final = "/openapi.json"

_POOLED: Final = words(
    "model user input messages add_special_tokens add_generation_prompt continue_final_message chat_template",
    "chat_template_kwargs media_io_kwargs mm_processor_kwargs padding truncation_side truncate_prompt_tokens",
    "use_activation priority",
)
_ENCODED: Final = _POOLED | words("encoding_format embed_dtype endianness dimensions")
_SCORED: Final = words(
    "model user use_activation truncate_prompt_tokens padding truncation_side mm_processor_kwargs priority",
    "chat_template_kwargs max_tokens_per_query max_tokens_per_doc instruction instruct query queries documents items",
    "data_1 data_2 text_1 text_2 top_n return_documents label_token_ids apply_softmax temperature item_first",
    "return_token_logprobs return_pooled_hidden_states score_extraction_token",
)

PASSED_ROUTES: Final[Mapping[str, frozenset[str]]] = {
    TOKENIZE: words(
        "model prompt messages tools tool_choice add_generation_prompt continue_final_message add_special_tokens",
        "return_token_strs chat_template chat_template_kwargs reasoning_effort media_io_kwargs mm_processor_kwargs",
    ),
    DETOKENIZE: words("model tokens skip_special_tokens"),
    "/v1/embeddings": _ENCODED,
    "/pooling": _ENCODED | words("task"),
    "/classify": _POOLED,
    "/v1/classify": _POOLED,
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), _SCORED),
    TRANSCRIBE: words(
        "file model language prompt response_format temperature timestamp_granularities timestamp_granularities[]",
        "stream stream_include_usage stream_continuous_usage_stats hotwords to_language seed n top_p top_k min_p",
        "frequency_penalty repetition_penalty presence_penalty length_penalty max_completion_tokens use_beam_search",
        "include_stop_str_in_output watermarking",
    ),
    GENERATE: words(
        "text input_ids image_data video_data audio_data modalities sampling_params stream return_logprob",
        "logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs return_hidden_states",
        "return_bytes return_entropy return_prompt_token_ids max_dynamic_patch min_dynamic_patch use_audio_in_video",
        "video_config images_config mm_processor_kwargs priority",
    ),
}
"""Path -> the fields that are forwarded, of either engine.

Fields that carry embeddings, code or addresses are left out, and so is the plugins' ``data`` on ``/pooling``, which may
name files.
"""

UNCACHED: Final = frozenset({TOKENIZE, DETOKENIZE})  # these compute nothing that another tenant could find


def served_routes(openapi: Mapping[str, object]) -> tuple[str, ...]:
    """Return the passed routes among the paths of an engine's ``/openapi.json``, in the order of the table."""
    paths = openapi.get("paths")
    return tuple(path for path in PASSED_ROUTES if path in paths) if isinstance(paths, Mapping) else ()
