"""Parsing and validation of request bodies; checks only what routing, fetching or the prompt depends on. Pure."""

from mmrouter_router.intake.chat import parse_chat
from mmrouter_router.intake.completions import parse_completion
from mmrouter_router.intake.field_check import Cause, Reason
from mmrouter_router.intake.forwarded_routes import parse_forwarded, parse_passed
from mmrouter_router.intake.request import ChatRequest, ImagePart, Limits, MediaPart

__all__ = [
    "Cause",
    "ChatRequest",
    "ImagePart",
    "Limits",
    "MediaPart",
    "Reason",
    "parse_chat",
    "parse_completion",
    "parse_forwarded",
    "parse_passed",
]
