"""The judgement of names inside the fields of a request, beside that of the fields themselves.

A name that its place does not have is a 400, as an unknown field is. Messages and content parts are judged by the
parsers of chats, responses and messages, which know their types. Fields that are not here hold maps of the client's
own names, or nothing that an engine reads. The conformance tests compare all of them with the engines' OpenAPI.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from mmrouter_lib.engines.base.request_fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES, words

Names: TypeAlias = "Mapping[str, Names | None]"
"""Name -> the names inside its value, ``None``: any. An array has the names of its items."""

SCHEMAS: Final = words("parameters schema json_schema input_schema output_schema arguments metadata attributes headers")
"""Names whose values are schemas or maps of a client's own names, wherever they stand."""


def names(known: str, **inside: Names) -> Names:
    return {**dict.fromkeys(known.split()), **inside}


def anywhere(*known: str) -> Names:
    """Return names that are known at every depth, for requests whose prompts are not predicted."""
    made: dict[str, Names | None] = {}
    made |= {name: None if name in SCHEMAS else made for name in words(*known)}
    return made


def unknown_name(value: Any, known: Names) -> str:
    """Return the path of the first unknown name inside a field's value, as ``[0].name``; empty where all are known."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in known:
                return f".{name}"
            inside = known[name]
            if inside is not None and isinstance(item, dict | list) and (path := unknown_name(item, inside)):
                return f".{name}{path}"
    elif isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, dict | list) and (path := unknown_name(item, known)):
                return f"[{number}]{path}"
    return ""


_STREAM: Final = names("include_usage continuous_usage_stats include_obfuscation")
_ANSWER: Final[Mapping[str, Names]] = {
    "stream_options": _STREAM,
    "response_format": names(
        "type format triggers at_least_one",  # the format is a grammar, which only constrains the answer
        json_schema=names("name description schema strict"),
        structures=names("begin schema end"),
    ),
    "structured_outputs": names(
        "json regex choice grammar json_object structural_tag disable_any_whitespace disable_additional_properties "
        "whitespace_pattern"
    ),
    "repetition_detection": names("max_pattern_size min_pattern_size min_count"),
}
_REASONING: Final = names("effort reasoning_effort enabled enable summary generate_summary context mode")
_TOOL: Final = names(
    "type defer_loading cache_control", function=names("name description parameters strict defer_loading cache_control")
)
_MEDIA: Final = (
    "image_url video_url audio_url image video audio url detail format uuid content_hash file_url file_id image_embeds "
    "video_embeds audio_embeds prompt_embeds image_pil prompt_cache_breakpoint mode ttl cache_control type"
)
"""Names of media, of which those that name a file, a cached image or embeddings are removed or refused afterwards."""
_ITEMS: Final = anywhere(
    _MEDIA,
    "input_audio",
    "acknowledged_safety_checks action actions allowed_callers allowed_domains allowed_tools always annotations",
    "approval_request_id approve arguments async attributes author authorization background button bytes call_id",
    "caller caller_id categories channel city code command commands complexity connector_id container container_id",
    "content content_type country created_by data defer_loading definition description diff display_height",
    "display_width domain domain_secrets effort embedding_weight encrypted_content end_index env environment error",
    "execution exit_code external_web_access file_data file_ids filename filters fingerprint frame_count",
    "frame_duration_ms function headers hybrid_search id index input input_fidelity input_image_mask input_schema",
    "input_tokens key keys logprob logprobs logs max_num_results max_output_length media_type memory_limit message",
    "metadata model moderation moderation_details moderation_stage name namespace network_policy never operation",
    "outcome output output_compression output_format output_schema output_tokens outputs param parameters",
    "partial_images path pattern pending_safety_checks phase quality queries query ranker ranking_options read_only",
    "reason reasoning reasoning_tokens recipient refusal region require_approval result results revised_prompt role",
    "schema score score_threshold scroll_x scroll_y search_content_types search_context_size server_description",
    "server_label server_url size skill_id skills source sources start_index status stderr stdout strict summary svg",
    "svg_usage syntax text text_weight timeout_ms timezone title token tool_names tools top_logprobs total_tokens",
    "tunnel_id user user_location value vector_store_ids version working_directory x y",
)
_PASSED: Final = anywhere(
    _MEDIA,
    "arguments author channel closed content content_type custom data defer_loading description file file_data",
    "filename function function_call id index input input_audio name parameters phase prefix reasoning",
    "reasoning_content recipient refusal role strict task text thinking tool_call_id tool_calls tools",
)

NESTED_FIELDS: Final[Mapping[str, Mapping[str, Names]]] = {
    CHAT: {**_ANSWER, "tools": _TOOL, "tool_choice": names("type", function=names("name")), "reasoning": _REASONING},
    COMPLETIONS: _ANSWER,
    RESPONSES: {
        "input": _ITEMS,
        "previous_input_messages": _ITEMS,
        "tools": _ITEMS,
        "tool_choice": names("type name mode server_label", function=names("name"), tools=_ITEMS),
        "reasoning": _REASONING,
        "text": names("verbosity", format=names("type name description schema strict")),
        "stream_options": _STREAM,
        "structured_outputs": _ANSWER["structured_outputs"],
    },
    MESSAGES: {
        "thinking": names("type budget_tokens display"),
        "tool_choice": names("type name disable_parallel_tool_use"),
        "output_config": names("effort", format=names("type schema name")),
    },
}
"""Endpoint -> field -> the names inside it."""

PASSED_NESTED: Final[Mapping[str, Names]] = {
    **dict.fromkeys(
        ["messages", "input", "query", "queries", "documents", "items", "data_1", "data_2", "text_1", "text_2"], _PASSED
    ),
    "tools": _TOOL,
    "tool_choice": names("type", function=names("name")),
    "sampling_params": names(
        "max_new_tokens min_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty "
        "presence_penalty repetition_penalty n beam_width json_schema regex ebnf structural_tag ignore_eos "
        "skip_special_tokens spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed "
        "watermark custom_params"  # the last one is refused unless null
    ),
}
"""Field of a passed route -> the names inside it."""
