"""Chat messages -> the exact token ids an engine computes with, and where each image stands in them."""

from mmrouter.prompt.errors import PlaceholderError, TemplateError
from mmrouter.prompt.expand import Expanded, PromptImage
from mmrouter.prompt.prompter import Prompter
from mmrouter.prompt.request import render_arguments

__all__ = ["Expanded", "PlaceholderError", "PromptImage", "Prompter", "TemplateError", "render_arguments"]
