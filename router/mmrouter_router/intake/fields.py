"""Which top-level fields of a chat request change the prompt, by what vLLM 0.32 does with them.

Every field is harmless, modelled, set by the router alone, or a reason why the prompt cannot be predicted. What stands
in none of these lists is a reason, too: a decision is never silently exact (DESIGN.md 3).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmrouter.engines.vllm import REFUSED_FIELDS, REFUSED_XARGS

Cause = Literal[
    "unknown_field",
    "media",
    "processor_options",
    "request_template",
    "truncation",
    "cache_not_read",
    "beam_search",
    "engine_arguments",
    "template_argument",
    "not_modelled",
]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a request cannot be exact: the field as the client wrote it, and a cause out of few (fit for a label)."""

    field: str
    reason: Cause


def words(*lines: str) -> frozenset[str]:
    """Return the set of the words in some lines."""
    return frozenset(" ".join(lines).split())


MODELLED = words(
    "model messages tools documents add_generation_prompt continue_final_message add_special_tokens",
    "chat_template_kwargs reasoning_effort",
)
"""Fields that the prompt is computed from."""

HARMLESS = words(
    # What is sampled, and when it ends.
    "temperature top_p top_k min_p n seed stop stop_token_ids min_tokens max_tokens max_completion_tokens logit_bias",
    "presence_penalty frequency_penalty repetition_penalty length_penalty ignore_eos bad_words allowed_token_ids",
    "include_stop_str_in_output repetition_detection thinking_token_budget watermarking",
    # What the answer must look like. A tool choice constrains the answer; the prompt shows all tools either way.
    "response_format structured_outputs tool_choice parallel_tool_calls include_reasoning",
    # What is reported, and how.
    "stream stream_options stream_interval logprobs top_logprobs logprob_token_ids return_token_ids return_prompt_text",
    "return_tokens_as_token_ids return_token_offsets skip_special_tokens spaces_between_special_tokens mm_payload",
    "return_mm_kwargs routed_experts_prompt_start",
    # Only read together with truncate_prompt_tokens.
    "truncation_side",
    # Order of service and bookkeeping.
    "priority session_id user",
    # Fields of OpenAI's API that the engine accepts and does not read.
    "metadata store service_tier modalities audio prediction verbosity web_search_options prompt_cache_key",
    "prompt_cache_retention safety_identifier functions function_call",
)
"""Fields that do not change the prompt or what the engine reuses of it."""

_AFFECTING: Mapping[str, Cause] = {
    "mm_processor_kwargs": "processor_options",
    "media_io_kwargs": "processor_options",
    "chat_template": "request_template",
    "truncate_prompt_tokens": "truncation",
    # The engine computes such prompts anew, so no overlap would be used.
    "prompt_logprobs": "cache_not_read",
    "echo": "cache_not_read",
    "use_beam_search": "beam_search",
}

_TEMPLATE_RESERVED = words(
    "padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs",
    "processor_kwargs add_special_tokens",
)
"""Names in ``chat_template_kwargs`` that the engine hands to its tokenizer instead of the template."""


def inexact_fields(body: Mapping[str, Any]) -> Iterable[Reason]:
    """Yield a reason for every top-level field whose effect on the prompt is not modelled."""
    for name, value in body.items():
        if name in HARMLESS or name in MODELLED or name in REFUSED_FIELDS:
            continue
        if name == "vllm_xargs":
            if set(value or ()) - set(REFUSED_XARGS):  # those are removed
                yield Reason(name, "engine_arguments")
        elif name not in _AFFECTING:
            yield Reason(name, "unknown_field")
        elif value is not None and value is not False:
            yield Reason(name, _AFFECTING[name])
    for name in body.get("chat_template_kwargs") or ():
        if name in _TEMPLATE_RESERVED:
            yield Reason(f"chat_template_kwargs.{name}", "template_argument")
