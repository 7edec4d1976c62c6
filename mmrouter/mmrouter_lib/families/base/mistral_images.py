"""Images of models in Mistral's format: rows of placeholders, each with a break behind it, the last with an end.

The geometry is that of ``mistral_common`` 1.13 (``ImageEncoder``) with the sizes of tekken.json: an image that is
longer than the limit is scaled down to it, rounded, to one pixel at least; then each side takes as many squares as
cover it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self

from mmrouter_lib.block_keys import Span
from mmrouter_lib.families.base.family import Family, NotModelledError, PlaceholderError, PromptImage
from mmrouter_lib.families.base.layout import check_size, size_of


@dataclass(frozen=True, slots=True)
class MistralImages(Family):
    """A model in Mistral's format that takes images. ``unit`` is the side of the square that one placeholder stands
    for, ``longest`` the greatest length of an image, both in pixels. ``ends``: ids of a row's end and of an image's.
    """

    name: str
    placeholder_id: int
    ends: tuple[int, int]
    unit: int
    longest: int
    placeholder_text: str = "[IMG]"
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType({})
    rotates_exif: ClassVar[bool] = False  # the library does not

    @classmethod
    def of(cls, name: str, encoder: Any) -> Self:
        """Return the family with the sizes and ids of a library's ``ImageEncoder``."""
        sizes, ids = encoder.image_config, encoder.special_ids
        unit = sizes.image_patch_size * sizes.spatial_merge_size
        return cls(name, ids.img, (ids.img_break, ids.img_end), unit, sizes.max_image_size)

    def count(self, width: int, height: int) -> int:
        """Return rows x (columns + 1). Raises :class:`ImageSizeError` for an image without pixels."""
        columns, rows = self._grid(width, height)
        return rows * (columns + 1)

    def run(self, width: int, height: int) -> list[int]:
        """Return the token ids of an image."""
        columns, rows = self._grid(width, height)
        return [*([*[self.placeholder_id] * columns, self.ends[0]] * rows)[:-1], self.ends[1]]

    def spans(self, ids: Sequence[int], images: Sequence[PromptImage]) -> Iterator[Span]:
        """Yield the spans of the images in a prompt's ``ids``, which have their runs in the same order.

        Raises :class:`PlaceholderError`.
        """
        behind = 0
        for image in images:
            length = self.count(*size_of(image))
            try:
                start = ids.index(self.placeholder_id, behind)
            except ValueError as error:
                raise PlaceholderError("the prompt has fewer images than the request") from error
            behind = start + length
            yield Span(offset=start, length=length, identity=image.identity)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        check_size(width, height)
        ratio = max(width / self.longest, height / self.longest)
        if ratio > 1:
            width, height = max(round(width / ratio), 1), max(round(height / ratio), 1)
        return (width - 1) // self.unit + 1, (height - 1) // self.unit + 1


@dataclass(frozen=True, slots=True)
class SizeEncoder:
    """Takes the place of the library's encoder of images, which decodes pictures: here each is named by its size."""

    family: MistralImages

    def __call__(self, chunk: Any) -> Any:
        from mistral_common.tokens.tokenizers.image import ImageEncoding  # noqa: PLC0415
        from numpy import empty  # noqa: PLC0415

        width, _, height = chunk.get_url().partition("x")
        tokens = self.family.run(int(width), int(height))
        return ImageEncoding(tokens=tokens, image=empty(0))


def with_sizes(messages: Sequence[Mapping[str, Any]], images: Sequence[PromptImage]) -> list[dict[str, Any]]:
    """Return messages whose images are named by their sizes, for :class:`SizeEncoder`.

    Raises :class:`NotModelledError` unless the size of each one is known.
    """
    left = iter(images)

    def named(part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") != "image_url":
            return part
        if (image := next(left, None)) is None:
            raise NotModelledError("an image is not resolved")
        width, height = size_of(image)
        return {"type": "image_url", "image_url": {"url": f"{width}x{height}"}}

    made = [dict(message) for message in messages]
    for message in made:
        if isinstance(content := message.get("content"), list):
            message["content"] = [named(part) for part in content]
    if next(left, None) is not None:
        raise NotModelledError("an image is no part of a message's content")
    return made
