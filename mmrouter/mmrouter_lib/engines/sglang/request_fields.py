"""The fields of requests to SGLang 0.5.23, compared with its request models by tests/conformance/sglang."""

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
    # Ends Qwen3-VL engines, and lets one tenant name the pixels of another.
    "mm_hashes",
    "mm_content_hashes",
    "content_hash",
    "extra_key",
    "cache_salt",
    "input_ids",  # with it the engine drops the images of a chat
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "rid",  # a client could choose the id of another tenant's request
    "request_id",  # the same, in a response
    "session_id",
    "session_params",
    "lora_path",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "kv_transfer_params",  # vLLM's: removed here too, so that one client works with both engines
    "ec_transfer_params",
)
"""Body fields that steer caches, transfers or other tenants' requests; only the router sets them."""

_REMOVED: Final = frozenset(REMOVED_FIELDS)

_SAMPLING: Final = words(
    "temperature top_p top_k min_p n seed stop stop_token_ids stop_regex no_stop_trim min_tokens max_tokens logit_bias",
    "presence_penalty frequency_penalty repetition_penalty ignore_eos regex ebnf response_format priority watermark",
)
_REPORTING: Final = words(
    "stream stream_options logprobs return_hidden_states return_routed_experts routed_experts_start_len",
    "return_cached_tokens_details return_spec_tokens_details return_token_ids skip_special_tokens",
)
_CODE: Final = {
    "custom_logit_processor": "it carries code for the engine",
    "custom_params": "it carries arguments for code in the engine",
}
_PROCESSOR: Final[Mapping[str, Effect]] = {
    "mm_processor_kwargs": "processor_options",
    "images_config": "processor_options",
}

REQUEST_FIELDS: Final[Mapping[Endpoint, RequestFields]] = {
    CHAT: RequestFields(
        prompt=words(
            "model messages tools tool_choice chat_template_kwargs reasoning reasoning_effort continue_final_message"
        ),
        harmless=_SAMPLING
        | _REPORTING
        | IGNORED_CHAT
        # The first three are vLLM's and have no effect here. The families that are modelled read neither task nor
        # thinking.
        | words(
            "documents add_generation_prompt add_special_tokens task thinking",
            "max_completion_tokens top_logprobs return_prompt_token_ids return_meta_info",
            "return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask sampling_logprobs_mode",
            "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 separate_reasoning stream_reasoning",
        ),
        affecting={
            **_PROCESSOR,
            "video_config": "processor_options",
            "max_dynamic_patch": "processor_options",
            "min_dynamic_patch": "processor_options",
            "use_audio_in_video": "processor_options",
        },
        removed=_REMOVED,
        refused=_CODE,
    ),
    COMPLETIONS: RequestFields(
        prompt=words("model prompt"),
        # The suffix is read only with --completion-template, which engines are not started with.
        harmless=_SAMPLING | _REPORTING | IGNORED_COMPLETIONS | words("json_schema custom_labels suffix"),
        affecting={**_PROCESSOR, "echo": "cache_not_read"},
        removed=_REMOVED,
        refused=_CODE,
    ),
    RESPONSES: RequestFields(
        prompt=words("model input instructions previous_response_id reasoning text tools chat_template_kwargs"),
        harmless=IGNORED_RESPONSES
        | words(
            "max_output_tokens temperature top_p top_k min_p stop presence_penalty frequency_penalty",
            "repetition_penalty priority stream tool_choice",
        ),
        removed=_REMOVED,
        refused=REFUSED_RESPONSES,
    ),
    MESSAGES: message_fields(_REMOVED, {}),
}
