"""The judgement of every field of a request body, per endpoint and engine.

A field in no list is unknown and the router answers 400, so that a field which a new engine release adds has no effect
until it is judged. The conformance tests compare the tables with the request models of real engines.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

Endpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]

CHAT: Final[Endpoint] = "/v1/chat/completions"
COMPLETIONS: Final[Endpoint] = "/v1/completions"
RESPONSES: Final[Endpoint] = "/v1/responses"
MESSAGES: Final[Endpoint] = "/v1/messages"

Effect: TypeAlias = Literal[
    "processor_options",
    "request_template",
    "truncation",
    "cache_not_read",
    "beam_search",
    "engine_arguments",
    "infilling",
]
"""Why a field can make a prompt, or the part of it that the engine reuses, differ from the prediction."""


def words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """One endpoint's fields by judgement. A field is in one of them, or unknown."""

    prompt: frozenset[str]  # forwarded; the prompt is made from them
    harmless: frozenset[str]  # forwarded; they change neither the prompt nor what the engine reuses of it
    affecting: Mapping[str, Effect] = field(default_factory=dict)  # forwarded; a request with them is not exact
    removed: frozenset[str]  # removed and counted: only the router sets them
    refused: Mapping[str, str] = field(default_factory=dict)  # field -> why it is a 400 unless null, false or empty

    def knows(self, name: str) -> bool:
        known = (self.harmless, self.prompt, self.removed, self.affecting, self.refused)
        return any(name in names for names in known)


def message_fields(removed: frozenset[str], affecting: Mapping[str, Effect]) -> RequestFields:
    """Return the fields of Anthropic's message requests, which reach every engine as a chat."""
    return RequestFields(
        prompt=words("model messages system tools tool_choice thinking output_config chat_template_kwargs"),
        harmless=words(
            "max_tokens stop_sequences stream temperature top_k top_p metadata service_tier context_management betas",
            "cache_control inference_geo speed user_profile_id watermarking mm_payload return_mm_kwargs",
        ),
        affecting=affecting,
        removed=removed,
        refused={"container": "engines have no containers", "mcp_servers": "engines call no servers"},
    )


IGNORED_CHAT: Final = words(
    "metadata store service_tier modalities audio prediction verbosity web_search_options prompt_cache_key",
    "prompt_cache_options prompt_cache_retention safety_identifier functions function_call user moderation",
    "parallel_tool_calls",
)
IGNORED_COMPLETIONS: Final = words("best_of user logit_bias")
IGNORED_RESPONSES: Final = words(
    "include max_tool_calls metadata moderation parallel_tool_calls prompt_cache_key prompt_cache_options",
    "prompt_cache_retention safety_identifier service_tier store stream_options truncation user context_management",
    "top_logprobs",
)
"""Fields of OpenAI's API that an engine may ignore and a client may send nevertheless."""

REFUSED_RESPONSES: Final = {
    "background": "an answer is sent on its own connection only",
    "background_options": "an answer is sent on its own connection only",
    "conversation": "engines keep no conversations; send the messages",
    "prompt": "engines keep no prompts; send 'instructions' and 'input'",
    "image": "engines generate text only",
    "access_programs": "engines have no such programs",
}
"""Fields of OpenAI's responses that no engine implements, although they change the answer."""
