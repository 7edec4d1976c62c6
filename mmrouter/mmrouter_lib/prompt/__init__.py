"""Chat messages -> the exact token ids that an engine computes with, and the span of each image."""

from mmrouter_lib.families import Expanded, NotModelledError, PlaceholderError, PromptImage, expand_ids
from mmrouter_lib.prompt.harmony import HarmonyPrompter
from mmrouter_lib.prompt.mistral import MistralPrompter
from mmrouter_lib.prompt.prompter import Prompter, render_arguments
from mmrouter_lib.prompt.segment_cache import PromptTooLongError
from mmrouter_lib.prompt.templates import TemplateError

AnyPrompter = Prompter | MistralPrompter | HarmonyPrompter

__all__ = [
    "AnyPrompter",
    "Expanded",
    "HarmonyPrompter",
    "MistralPrompter",
    "NotModelledError",
    "PlaceholderError",
    "PromptImage",
    "PromptTooLongError",
    "Prompter",
    "TemplateError",
    "expand_ids",
    "render_arguments",
]
