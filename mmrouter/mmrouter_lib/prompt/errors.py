"""What can be wrong with a prompt. Both are the client's: an answer of 400."""

from mmrouter_lib.families import PlaceholderError

__all__ = ["PlaceholderError", "TemplateError"]


class TemplateError(ValueError):
    """The messages cannot be put into the chat template, or the template itself refuses them."""
