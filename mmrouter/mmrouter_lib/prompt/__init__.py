"""Chat messages -> the exact token ids an engine computes with, and where each image stands in them."""

from mmrouter.families import Expanded, PlaceholderError, PromptImage, expand_ids
from mmrouter.prompt.errors import TemplateError
from mmrouter.prompt.prompter import Prompter
from mmrouter.prompt.request import render_arguments

__all__ = [
    "Expanded",
    "PlaceholderError",
    "PromptImage",
    "Prompter",
    "TemplateError",
    "expand_ids",
    "render_arguments",
]
