"""What the rest of the project needs to know of a model family."""

from collections.abc import Mapping
from typing import Protocol


class ImageSizeError(ValueError):
    """The engine's image processor refuses an image of this size."""


class ProcessorLimits(Protocol):
    """Pixel limits that the resource sets over those of the checkpoint; ``None`` leaves the checkpoint's."""

    @property
    def min_pixels(self) -> int | None: ...

    @property
    def max_pixels(self) -> int | None: ...


class Family(Protocol):
    """Image size -> placeholder tokens, for one model folder."""

    @property
    def name(self) -> str:
        """``model_type`` of the folder's config.json."""

    @property
    def placeholder_id(self) -> int:
        """Token id that the engine replaces by one run per image."""

    @property
    def placeholder_text(self) -> str:
        """Text of that token."""

    @property
    def media_text(self) -> Mapping[str, str]:
        """Modality -> text that stands for one item where a chat template takes plain strings."""

    @property
    def pixel_options(self) -> dict[str, int]:
        """The processor options in force: they change pixels, so they belong to the media identity."""

    @property
    def rotates_exif(self) -> bool:
        """Whether the engine rotates an image by its EXIF orientation before it counts tokens."""

    def count(self, width: int, height: int) -> int:
        """Return how many placeholder tokens an image of this size (pixels, after rotation) becomes.

        Raises :class:`ImageSizeError` for a size that the image processor refuses.
        """
