"""InternVL of its authors as SGLang 0.5.23 takes it: tiles by a rule of its own, and places that it adds to a prompt.

The engine puts ``<image>`` for each image before the answer (``InternVLProcessor``), beside the ``<IMG_CONTEXT>`` of
its form, then gives the images to the first places of either kind. The places that are left stay in the prompt, as a
text of the engine's. Compared with its code by ``tests/conformance/sglang/test_images.py``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Final, Self

from mmrouter_lib.families import Expanded, Family, ModelFolderError, NotModelledError, PromptImage, expand_ids
from mmrouter_lib.families.base.layout import check_size
from mmrouter_lib.families.internvl import BEGIN, END
from mmrouter_lib.families.internvl_chat import CONTEXT, IMAGE, InternVLChat

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec

TILE: Final = 448  # pixels of a tile's side, whatever the folder says
MOST: Final = 12  # tiles of an image, the whole picture apart, whatever the folder says
_LEFT: Final = "<<<__IMG_PLACEHOLDER__>>>"
_PLACE: Final = re.compile(f"{IMAGE}|{CONTEXT}")
_TYPED: Final = re.compile(f"{BEGIN}|{END}|<video>|<<<__")
"""With images, an engine that reads one of these takes other tokens for theirs, or loads them in another way."""
_ANSWER: Final = "<|im_start|>assistant"


@dataclass(frozen=True, slots=True)
class SglangInternVL(InternVLChat):
    """An InternVL folder of its authors on SGLang; the fields are InternVL's. Images are taken as they are stored."""

    rotates_exif: ClassVar[bool] = False

    @classmethod
    def of(cls, family: Family) -> Self:
        """Return the form of an :class:`InternVLChat`. Raises :class:`ModelFolderError` for tiles of another size."""
        if not isinstance(family, InternVLChat) or family.tile != TILE:
            raise ModelFolderError(f"{family.name}: SGLang cuts tiles of {TILE} pixels only")
        values = {each.name: getattr(family, each.name) for each in fields(family)}
        return cls(**(values | {"least": 1, "most": MOST}))

    def count(self, width: int, height: int) -> int:
        """Return the tokens of all tiles and the two around them. Raises :class:`ImageSizeError` for no pixels."""
        check_size(width, height)
        tiles = _tiles(width / height)
        return (tiles + (tiles > 1)) * self.tile_tokens + 2

    def expand_text(
        self, codec: "TokenizerCodec", text: str, images: Sequence[PromptImage], *, add_special_tokens: bool
    ) -> Expanded:
        """As :meth:`Family.expand_text`. Raises :class:`NotModelledError` for a text that the engine takes for a place
        of another medium or for a border of an image's tokens.
        """
        if not images:
            return Expanded(codec.encode(text, add_special_tokens=add_special_tokens), ())
        lacking = len(images) - text.count(IMAGE)
        if lacking < 0 or _TYPED.search(text):
            raise NotModelledError(f"a text has more of {IMAGE} than there are images, or another place for media")
        if lacking:
            before, answer, after = text.rpartition(_ANSWER)
            more = "\n" + f"{IMAGE}\n" * lacking
            text = before + more + answer + after if answer else text + more
        pieces = _PLACE.split(text)
        kept, left = pieces[: len(images)], pieces[len(images) :]
        placed = f"{BEGIN}{CONTEXT}{END}".join((*kept, _LEFT.join(left)))
        ids = codec.encode(placed, add_special_tokens=add_special_tokens)
        runs = [self.tokens(codec, image, number)[1:-1] for number, image in enumerate(images)]
        return expand_ids(ids, self.placeholder_id, images, runs)


@lru_cache(maxsize=4096)
def _tiles(ratio: float) -> int:
    """Return the number of tiles of an image: those of the grid that is closest to its ratio of width to height, and of
    equally close ones the largest.
    """
    grids = ((columns, rows) for columns in range(1, MOST + 1) for rows in range(1, MOST // columns + 1))
    return max((-abs(ratio - columns / rows), columns * rows) for columns, rows in grids)[1]
