"""Parsing and validation of request bodies into a :class:`ChatRequest`. Pure.

Checks only what routing, fetching or the prompt depends on; the engine checks the rest, and its errors are passed on.
"""

from mmrouter_router.intake.chat import parse_chat
from mmrouter_router.intake.forwarded_routes import parse_forwarded
from mmrouter_router.intake.prompt_fields import Cause, Reason
from mmrouter_router.intake.request import ChatRequest, ImagePart, Limits, MediaPart

__all__ = ["Cause", "ChatRequest", "ImagePart", "Limits", "MediaPart", "Reason", "parse_chat", "parse_forwarded"]
