"""Parsing and validation of request bodies; checks only what routing, fetching or the prompt depends on. Pure."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from mmrouter_lib.engines.base.passed_routes import PASSED_ROUTES
from mmrouter_lib.engines.base.request_fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from mmrouter_router.intake.chat import parse_chat
from mmrouter_router.intake.completions import parse_completion
from mmrouter_router.intake.field_check import Cause, Reason
from mmrouter_router.intake.forwarded_routes import parse_forwarded, parse_passed
from mmrouter_router.intake.messages import COUNT_TOKENS, TemplateTraits, parse_messages
from mmrouter_router.intake.request import ChatRequest, ImagePart, Limits, MediaPart
from mmrouter_router.intake.responses import CHAT_FIELDS, parse_responses

__all__ = [
    "CHAT_FIELDS",
    "COUNT_TOKENS",
    "PARSERS",
    "Cause",
    "ChatRequest",
    "ImagePart",
    "Limits",
    "MediaPart",
    "Reason",
    "TemplateTraits",
    "parse_chat",
    "parse_completion",
    "parse_forwarded",
    "parse_messages",
    "parse_passed",
    "parse_responses",
]

PARSERS: Final[Mapping[str, Callable[..., ChatRequest]]] = {
    CHAT: parse_chat,
    COMPLETIONS: parse_completion,
    RESPONSES: parse_responses,
    MESSAGES: parse_messages,
    COUNT_TOKENS: partial(parse_messages, counts=True),
    **{path: partial(parse_passed, path) for path in PASSED_ROUTES},
}
"""Path of a hot route -> parser of its bodies."""
