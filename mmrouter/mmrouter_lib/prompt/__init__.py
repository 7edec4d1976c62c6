"""Chat messages -> the exact token ids that an engine computes with, and the span of each image."""

from mmrouter_lib.families import Expanded, PlaceholderError, PromptImage, expand_ids
from mmrouter_lib.prompt.messages import TemplateError
from mmrouter_lib.prompt.prompter import Prompter
from mmrouter_lib.prompt.render_arguments import render_arguments

__all__ = ["Expanded", "PlaceholderError", "PromptImage", "Prompter", "TemplateError", "expand_ids", "render_arguments"]
