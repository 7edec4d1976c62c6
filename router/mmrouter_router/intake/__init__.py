"""A request body -> :class:`ChatRequest`: what routing needs, checked, and why the prompt may not be predictable.

Pure. Only what routing, fetching or the prompt depends on is checked here; the engine judges the rest, and its words
are passed on.
"""

from mmrouter_router.intake.chat import parse_chat
from mmrouter_router.intake.fields import Cause, Reason
from mmrouter_router.intake.forwarded import parse_forwarded
from mmrouter_router.intake.request import ChatRequest, ImagePart, Limits, MediaPart

__all__ = ["Cause", "ChatRequest", "ImagePart", "Limits", "MediaPart", "Reason", "parse_chat", "parse_forwarded"]
