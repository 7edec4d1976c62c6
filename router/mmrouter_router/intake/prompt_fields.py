"""Classification of a chat request's fields by their effect on the prompt.

Every field is harmless, modelled, set by the router alone, or a reason why the prompt cannot be predicted. An unknown
field is a reason, too: a decision is never silently exact (docs/exactness.md). The lists are those of vLLM 0.32; each
field is proved against it by tests/conformance/vllm/test_fields.py.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.vllm.adapter import REFUSED_FIELDS, REFUSED_XARGS

Exactness = Literal["exact", "partial", "affinity"]  # how much is predicted: all, up to the first image, nothing

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


class Reason(NamedTuple):
    """Why a request cannot be exact: the field as the client wrote it, and a cause that is fit for a metric's label."""

    field: str
    reason: Cause

    @property
    def label(self) -> str:
        return f"{self.reason}:{self.field}"


def words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


MODELLED = words(
    "model messages tools documents add_generation_prompt continue_final_message add_special_tokens",
    "chat_template_kwargs reasoning_effort",
)
"""Fields that the prompt is computed from."""

HARMLESS = words(
    # Sampling and its end.
    "temperature top_p top_k min_p n seed stop stop_token_ids min_tokens max_tokens max_completion_tokens logit_bias",
    "presence_penalty frequency_penalty repetition_penalty length_penalty ignore_eos bad_words allowed_token_ids",
    "include_stop_str_in_output repetition_detection thinking_token_budget watermarking",
    # Form of the answer. The prompt shows all tools whatever the tool choice, since engines are not started with
    # --exclude-tools-when-tool-choice-none.
    "response_format structured_outputs tool_choice parallel_tool_calls include_reasoning",
    # Reporting.
    "stream stream_options stream_interval logprobs top_logprobs logprob_token_ids return_token_ids return_prompt_text",
    "return_tokens_as_token_ids return_token_offsets skip_special_tokens spaces_between_special_tokens mm_payload",
    "return_mm_kwargs routed_experts_prompt_start",
    # Read only together with truncate_prompt_tokens.
    "truncation_side",
    # Scheduling and bookkeeping.
    "priority session_id user",
    # Fields of OpenAI's API that the engine accepts and ignores.
    "metadata store service_tier modalities audio prediction verbosity web_search_options prompt_cache_key",
    "prompt_cache_retention safety_identifier functions function_call",
)
"""Fields that change neither the prompt nor what the engine reuses of it."""

_AFFECTING: Mapping[str, Cause] = {
    "mm_processor_kwargs": "processor_options",
    "media_io_kwargs": "processor_options",
    "chat_template": "request_template",
    "truncate_prompt_tokens": "truncation",
    # The engine recomputes such prompts, so no overlap would be used.
    "prompt_logprobs": "cache_not_read",
    "echo": "cache_not_read",
    "use_beam_search": "beam_search",
}

_TEMPLATE_RESERVED = words(
    "padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs",
    "processor_kwargs add_special_tokens",
)
"""Names in ``chat_template_kwargs`` that the engine passes to its tokenizer instead of the template."""


def inexact_fields(body: Mapping[str, Any], engine: EngineType = "vllm") -> Iterable[Reason]:
    """Yield a reason for every top-level field whose effect on the prompt is not modelled."""
    divergent = adapter(engine).divergent_fields
    for name, value in body.items():
        if name in divergent and value is not divergent[name]:
            yield Reason(name, "engine_differs")
        elif name in HARMLESS or name in MODELLED or name in REFUSED_FIELDS:
            continue
        elif name == "vllm_xargs":
            if set(value or ()) - set(REFUSED_XARGS):  # those are removed
                yield Reason(name, "engine_arguments")
        elif name not in _AFFECTING:
            yield Reason(name, "unknown_field")
        elif name == "media_io_kwargs":
            # Options are per modality; only those for images matter.
            if value and not (isinstance(value, Mapping) and not value.get("image")):
                yield Reason(name, _AFFECTING[name])
        elif value is not None and value is not False and value != {}:
            yield Reason(name, _AFFECTING[name])
    for name in body.get("chat_template_kwargs") or ():
        if name in _TEMPLATE_RESERVED:
            yield Reason(f"chat_template_kwargs.{name}", "template_argument")


def inexact_messages(messages: Iterable[Mapping[str, Any]], engine: EngineType) -> Iterable[Reason]:
    """Yield a reason for every message that this engine renders differently than modelled.

    The model is vLLM's. SGLang renders plain system, user and assistant turns alike; it normalises tool calls and tool
    results by its own rules, and turns a final assistant message into a user message.
    """
    if not adapter(engine).normalizes_messages:
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
