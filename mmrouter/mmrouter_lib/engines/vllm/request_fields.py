"""The fields of requests to vLLM 0.30 to 0.33, compared with its request models by tests/conformance."""

from collections.abc import Mapping
from typing import Final

from mmrouter_lib.engines.base.request_fields import (
    CHAT,
    COMPLETIONS,
    IGNORED_CHAT,
    IGNORED_COMPLETIONS,
    IGNORED_RESPONSES,
    MESSAGES,
    REFUSED_RESPONSES,
    RESPONSES,
    Effect,
    Endpoint,
    RequestFields,
    message_fields,
    words,
)

REMOVED_FIELDS: Final = (
    "cache_salt",
    "mm_hashes",
    "content_hash",
    "extra_key",
    "kv_transfer_params",
    "ec_transfer_params",
    "request_id",  # a client could choose the id of another tenant's request
)
"""Body fields that steer caches, transfers or other tenants' requests; only the router sets them."""

REMOVED_XARGS: Final = ("kv_cache_report_mode", "kv_transfer_params", "ec_transfer_params")

_REMOVED: Final = frozenset(REMOVED_FIELDS)

_SAMPLING: Final = words(
    "temperature top_p top_k min_p n seed stop stop_token_ids min_tokens max_tokens logit_bias presence_penalty",
    "frequency_penalty repetition_penalty length_penalty ignore_eos bad_words allowed_token_ids",
    "include_stop_str_in_output repetition_detection thinking_token_budget watermarking response_format",
    "structured_outputs priority session_id",
)
_REPORTING: Final = words(
    "stream stream_options stream_interval logprobs logprob_token_ids return_token_ids return_tokens_as_token_ids",
    "return_token_offsets skip_special_tokens spaces_between_special_tokens mm_payload return_mm_kwargs",
    "routed_experts_prompt_start return_weight_versions",
)

_ENGINE_ARGUMENTS: Final[Mapping[str, Effect]] = {"vllm_xargs": "engine_arguments"}
_PROCESSOR: Final[Mapping[str, Effect]] = {
    "mm_processor_kwargs": "processor_options",
    "media_io_kwargs": "processor_options",
}
_GENERATION: Final[Mapping[str, Effect]] = {
    "truncate_prompt_tokens": "truncation",
    # The engine recomputes such prompts, so no overlap would be used.
    "prompt_logprobs": "cache_not_read",
    "echo": "cache_not_read",
    "use_beam_search": "beam_search",
}

REQUEST_FIELDS: Final[Mapping[Endpoint, RequestFields]] = {
    CHAT: RequestFields(
        prompt=words(
            "model messages tools documents add_generation_prompt continue_final_message add_special_tokens",
            "chat_template_kwargs reasoning_effort",
        ),
        # The prompt shows all tools whatever the tool choice, since engines are not started with
        # --exclude-tools-when-tool-choice-none. The truncation side is read only together with truncate_prompt_tokens.
        harmless=_SAMPLING
        | _REPORTING
        | IGNORED_CHAT
        | words("max_completion_tokens tool_choice include_reasoning top_logprobs return_prompt_text truncation_side"),
        affecting={**_ENGINE_ARGUMENTS, **_PROCESSOR, **_GENERATION, "chat_template": "request_template"},
        removed=_REMOVED,
        refused={"return_assistant_tokens_mask": "only vLLM 0.30 has it, and only for its renderer's answers"},
    ),
    COMPLETIONS: RequestFields(
        prompt=words("model prompt add_special_tokens"),
        harmless=_SAMPLING | _REPORTING | IGNORED_COMPLETIONS | words("truncation_side"),
        # The engine puts the text between prompt and suffix for the models that can, and refuses it for all others.
        affecting={**_ENGINE_ARGUMENTS, **_GENERATION, "suffix": "infilling"},
        removed=_REMOVED,
        refused={"prompt_embeds": "send text or token ids, not embeddings"},
    ),
    RESPONSES: RequestFields(
        prompt=words(
            "model input instructions previous_response_id previous_input_messages reasoning text tools",
            "chat_template_kwargs",
        ),
        harmless=IGNORED_RESPONSES
        | words(
            "max_output_tokens temperature top_p top_k min_p seed stop stop_token_ids presence_penalty ignore_eos",
            "frequency_penalty repetition_penalty logit_bias include_stop_str_in_output skip_special_tokens",
            "watermarking structured_outputs priority session_id stream tool_choice include_reasoning mm_payload",
            "return_mm_kwargs enable_response_messages spaces_between_special_tokens",
        ),
        affecting={**_ENGINE_ARGUMENTS, **_PROCESSOR},
        removed=_REMOVED,
        refused=REFUSED_RESPONSES,
    ),
    MESSAGES: message_fields(_REMOVED, _ENGINE_ARGUMENTS),
}
