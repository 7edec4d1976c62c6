"""The interface of a model family, and the values that cross it."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mmrouter_lib.block_keys import Span
from mmrouter_lib.model_folder import ModelFolderError


class ImageSizeError(ValueError):
    """The engine's image processor refuses an image of this size."""


class PlaceholderError(ValueError):
    """The placeholders in the prompt do not fit the images of the request."""


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a request: its media identity (32 bytes) and the number of placeholder tokens it becomes.

    Images that cannot be resolved are included too, with one token and a unique identity, because the presence of
    images can change how the text is tokenized (Phi-3).
    """

    identity: bytes
    count: int


@dataclass(frozen=True, slots=True)
class Expanded:
    """An expanded prompt: ``ids`` (u32) and one span per image, in prompt order.

    ``unplaced`` is the offset of the first placeholder without an image, ``None`` when there is none: one that a user
    typed, or, when only the resolved images of a request were given, that of the first unresolved one.
    """

    ids: "array[int]"
    spans: tuple[Span, ...]
    unplaced: int | None


class ProcessorLimits(Protocol):
    """Processor options of the resource, which override those of the checkpoint; ``None`` keeps the checkpoint's."""

    @property
    def min_pixels(self) -> int | None: ...

    @property
    def max_pixels(self) -> int | None: ...

    @property
    def num_crops(self) -> int | None: ...


def refuse_options(limits: ProcessorLimits | None, *names: str, family: str) -> None:
    """Raise :class:`ModelFolderError` where the resource sets a processor option that the family does not have."""
    for name in names:
        if getattr(limits, name, None) is not None:
            raise ModelFolderError(f"spec.engine.processor: {name} is no option of {family}")


class Codec(Protocol):
    """A model folder's tokenizer, as far as a family needs it."""

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the tokens that tokenizer_config.json names as special (``eos_token`` ..., additional ones)."""

    @property
    def begin_id(self) -> int | None:
        """Token id of ``bos_token``, ``None`` without one."""

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Return the token ids (u32) of a text."""

    def decode(self, ids: "array[int]") -> str:
        """Return the text of token ids, special tokens included."""

    def token_id(self, text: str) -> int | None:
        """Return the id of a text that is one token of the vocabulary, ``None`` otherwise."""


class Family(Protocol):
    """Image size -> placeholder tokens, and prompt text -> token ids, for one model folder."""

    @property
    def name(self) -> str:
        """``model_type`` of the folder's config.json."""

    @property
    def placeholder_id(self) -> int:
        """Token id that fills an image's span."""

    @property
    def placeholder_text(self) -> str:
        """Text of that token."""

    @property
    def media_text(self) -> Mapping[str, str]:
        """Modality -> text that stands for one item where a chat template takes plain strings.

        ``{number}`` in it stands for the item's number, from 1, among those of its modality in the whole chat.
        """

    @property
    def pixel_options(self) -> dict[str, int]:
        """The processor options in force: they change pixels, so they belong to the media identity."""

    @property
    def rotates_exif(self) -> bool:
        """Whether the engine rotates an image by its EXIF orientation before it counts tokens."""

    @property
    def fragile(self) -> bool:
        """Whether placeholders that do not fit the images can end the engine: such a request must not be forwarded."""

    def count(self, width: int, height: int) -> int:
        """Return how many placeholder tokens an image of this size (pixels, after rotation) becomes.

        Raises :class:`ImageSizeError` for a size that the image processor refuses.
        """

    def check(self, codec: Codec) -> None:
        """Raise :class:`ModelFolderError` for a tokenizer that does not fit the family."""

    def expand(self, codec: Codec, text: str, images: Sequence[PromptImage], *, add_special_tokens: bool) -> Expanded:
        """Return the token ids of a prompt text with every image expanded, and the images' spans.

        Raises :class:`PlaceholderError` when the text has no place for an image, or one that the engine cannot use.
        """
