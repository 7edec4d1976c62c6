"""Which top-level fields of a chat request change the prompt, by what the engine does with them.

Every field is harmless, modelled, set by the router alone, or a reason why the prompt cannot be predicted. What stands
in none of these lists is a reason, too: a decision is never silently exact (docs/exactness.md). The lists of vLLM are
those of 0.32, each field proved against it (tests/conformance/vllm/test_fields.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines.vllm.request import REFUSED_FIELDS, REFUSED_XARGS

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
    "engine_differs",
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
    # What the answer must look like. A tool choice constrains the answer; the prompt shows all tools either way, since
    # engines are not started with --exclude-tools-when-tool-choice-none.
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

_SGLANG_OTHERWISE = words(
    "tools documents add_generation_prompt continue_final_message add_special_tokens reasoning_effort session_id"
)
"""Fields that are modelled or harmless for vLLM, and that act otherwise in SGLang, or not at all."""
_DEFAULTS: Mapping[str, bool] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
}
"""Values under which those fields are the same to both."""


def inexact_fields(body: Mapping[str, Any], engine: EngineType = "vllm") -> Iterable[Reason]:
    """Yield a reason for every top-level field whose effect on the prompt is not modelled."""
    for name, value in body.items():
        if engine == "sglang" and name in _SGLANG_OTHERWISE and value is not _DEFAULTS.get(name):
            yield Reason(name, "engine_differs")
        elif name in HARMLESS or name in MODELLED or name in REFUSED_FIELDS:
            continue
        elif name == "vllm_xargs":
            if set(value or ()) - set(REFUSED_XARGS):  # those are removed
                yield Reason(name, "engine_arguments")
        elif name not in _AFFECTING:
            yield Reason(name, "unknown_field")
        elif name == "media_io_kwargs":
            # Options are per modality, and those of another one leave images as they are.
            if value and not (isinstance(value, Mapping) and not value.get("image")):
                yield Reason(name, _AFFECTING[name])
        elif value is not None and value is not False and value != {}:
            yield Reason(name, _AFFECTING[name])
    for name in body.get("chat_template_kwargs") or ():
        if name in _TEMPLATE_RESERVED:
            yield Reason(f"chat_template_kwargs.{name}", "template_argument")


def inexact_messages(messages: Iterable[Mapping[str, Any]], engine: EngineType) -> Iterable[Reason]:
    """Yield a reason for every message that this engine puts into its prompt in another way than it is modelled.

    The model of a prompt is vLLM's. SGLang shows plain system, user and assistant turns alike; it normalises tool calls
    and tool results by rules of its own, and turns a final assistant message into one of the user.
    """
    if engine != "sglang":
        return
    role = None
    number = -1
    for number, message in enumerate(messages):
        role = message.get("role")
        if role not in ("system", "user", "assistant"):
            yield Reason(f"messages[{number}].role", "engine_differs")
        for name in ("tool_calls", "reasoning", "reasoning_content"):
            if message.get(name):
                yield Reason(f"messages[{number}].{name}", "engine_differs")
    if role == "assistant":
        yield Reason(f"messages[{number}].role", "engine_differs")
