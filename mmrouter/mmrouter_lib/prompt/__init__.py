"""Chat messages -> the exact token ids that an engine computes with, and the span of each image."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from mmrouter_lib.families import Expanded, Family, NotModelledError, PlaceholderError, PromptImage, expand_ids
from mmrouter_lib.prompt.harmony import HarmonyPrompter
from mmrouter_lib.prompt.mistral import MistralPrompter
from mmrouter_lib.prompt.prompter import Prompter, render_arguments
from mmrouter_lib.prompt.segment_cache import PromptTooLongError
from mmrouter_lib.prompt.templates import TemplateError


class AnyPrompter(Protocol):
    """What the router needs of each kind of prompter.

    ``first_release``: the engine's first release that makes the same prompts, empty where all proved ones do.
    """

    first_release: ClassVar[tuple[int, ...]] = ()

    @property
    def family(self) -> Family: ...

    def prompt(self, body: Mapping[str, Any], images: Sequence[PromptImage]) -> Expanded:
        """Return the prompt of a chat request's body.

        Raises :class:`TemplateError`, :class:`NotModelledError`, :class:`PlaceholderError`, :class:`PromptTooLongError`
        and :class:`~mmrouter_lib.prompt.segment_cache.NewTextError`.
        """

    def completion(self, prompt: "str | array[int]", *, add_special_tokens: bool = True) -> Expanded:
        """Return the prompt of a completion: of a text, or of token ids, which stay as they are.

        Raises :class:`TemplateError`, :class:`PromptTooLongError` and
        :class:`~mmrouter_lib.prompt.segment_cache.NewTextError`.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""


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
