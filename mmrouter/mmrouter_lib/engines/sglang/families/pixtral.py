"""Mistral 3 on SGLang 0.5.23: each row of an image is a run of its own, and the engine pads images to others.

The engine pads the images of a request to the largest width and height among them and names each by the padded tensor
(``PixtralProcessor``), so that an image has a name for each size that it is padded to. Compared with its code by
``tests/conformance/sglang/test_images.py``.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Self

from mmrouter_lib.block_keys import Span
from mmrouter_lib.families import Expanded, Family, ModelFolderError, PromptImage, expand_ids
from mmrouter_lib.families.base.layout import size_of, special_id
from mmrouter_lib.families.pixtral import BREAK, END, Pixtral

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec


@dataclass(frozen=True, slots=True)
class SglangPixtral(Pixtral):
    """A Mistral 3 folder on SGLang; the fields are Pixtral's. Images are taken as they are stored."""

    rotates_exif: ClassVar[bool] = False
    pads_images: ClassVar[bool] = True

    @classmethod
    def of(cls, family: Family) -> Self:
        """Return the form of a :class:`Pixtral`."""
        if not isinstance(family, Pixtral):
            raise ModelFolderError(f"{family.name} has no Pixtral tower")
        return cls(**{each.name: getattr(family, each.name) for each in fields(family)})

    def paddings(self, sizes: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int] | None]:
        """As :meth:`Family.paddings`: all are padded that have not the most columns and the most rows."""
        grids = [self._grid(*size) for size in sizes]
        columns, rows = (max(sides) for sides in zip(*grids, strict=True))
        # The limit may be no multiple of the unit, and a larger image would be scaled down.
        whole = min(columns * self.unit, self.longest), min(rows * self.unit, self.longest)
        return [None if grid == (columns, rows) else whole for grid in grids]

    def expand_text(
        self, codec: "TokenizerCodec", text: str, images: Sequence[PromptImage], *, add_special_tokens: bool
    ) -> Expanded:
        """As :meth:`Family.expand_text`: the spans are rows."""
        ids = codec.encode(text, add_special_tokens=add_special_tokens)
        return self.expand_ids(ids, images, special_id(codec, BREAK), special_id(codec, END))

    def expand_ids(self, ids: "array[int]", images: Sequence[PromptImage], row_end: int, image_end: int) -> Expanded:
        """Return the prompt of a text's ``ids``; the spans are rows. ``row_end``, ``image_end``: as in :meth:`rows`.

        Raises :class:`PlaceholderError` and :class:`ImageSizeError`.
        """
        done = expand_ids(ids, self.placeholder_id, images, [self.rows(image, row_end, image_end) for image in images])
        spans = zip(done.spans, images, strict=True)
        return Expanded(done.ids, tuple(self._in_rows(span, image) for span, image in spans))

    def _in_rows(self, span: Span, image: PromptImage) -> Span:
        columns, _ = self._grid(*size_of(image))
        return replace(span, length=span.length - 1, row=columns)
