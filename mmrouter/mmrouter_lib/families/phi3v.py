"""Phi-3-vision and Phi-3.5-vision: tiles of 336 pixels with separators, and numbered tags that no vocabulary has.

The rules were observed on vLLM 0.32 (docs/engine-facts/vllm.md#placeholder-counts).
"""

import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mmrouter_lib.block_keys import Span
from mmrouter_lib.families.base.family import (
    Expanded,
    Family,
    ImageSizeError,
    PlaceholderError,
    ProcessorLimits,
    PromptImage,
    are_sizes,
    placeholder_run,
    refuse_options,
    register,
)
from mmrouter_lib.model_folder import ModelFolderError, find_json, image_processor, whole_number

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec

MODEL_TYPE = "phi3_v"
TILE = 336  # side of a tile in pixels
_TILE_TOKENS = 144
_TILE_ROWS = 12
_MOST_DIGITS = 9  # a number beyond any image's, before it becomes too long to read
_TAG = re.compile(r"<\|image_\d+\|>")


@dataclass(frozen=True, slots=True)
class Phi3V(Family):
    """A Phi-3-vision folder; ``num_crops`` is the greatest number of tiles of an image."""

    num_crops: int
    placeholder_id: int = 32044
    """vLLM fills images with this id, whatever the vocabulary has there. Alone it is no placeholder."""
    placeholder_text: str = "<|image|>"
    name: str = MODEL_TYPE
    fragile: ClassVar[bool] = True
    """Tags out of order end vLLM 0.32 or swap pictures (docs/engine-facts/vllm.md#requests-that-end-the-engine)."""
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType({"image": "<|image_{number}|>"})

    @property
    def pixel_options(self) -> dict[str, int]:
        return {"num_crops": self.num_crops}

    def with_options(self, options: Mapping[str, Any]) -> Self | None:
        """Return the family with a request's greatest number of tiles."""
        return replace(self, **options) if are_sizes(options, self.pixel_options) else None

    def count(self, width: int, height: int) -> int:
        """Return the tokens of tiles, whole picture and separators. Raises :class:`ImageSizeError` as :func:`tiles`."""
        rows, columns = tiles(width, height, self.num_crops)
        return (rows * columns + 1) * _TILE_TOKENS + 1 + (rows + 1) * _TILE_ROWS

    def check(self, codec: "TokenizerCodec") -> None:
        """Raise :class:`ModelFolderError` for a tokenizer that begins no text with a token of its own.

        The tags are no tokens, so no vocabulary needs them. The rule by which a text is cut at them is proved only for
        tokenizers that put one token in front of each piece.
        """
        begin = codec.encode("", add_special_tokens=True)
        if len(begin) != 1 or begin[0] != codec.begin_id:
            raise ModelFolderError(f"the tokenizer begins a text with {begin.tolist()}, not with its bos_token")

    def expand(
        self, codec: "TokenizerCodec", text: str, images: Sequence[PromptImage], *, add_special_tokens: bool
    ) -> Expanded:
        """Return the expanded prompt.

        Without images the text is tokenized as it is. With images, its ids are decoded, the text is cut at every
        numbered tag, and the pieces are tokenized one by one, each with a beginning-of-text token. Tag n becomes image
        n where it first occurs; all other tags keep their text's tokens.

        Raises :class:`PlaceholderError` unless the tags 1 to n first appear in this order: vLLM takes lengths by tag
        number and pictures by position, and ends on a request where they differ.
        """
        ids = codec.encode(text, add_special_tokens=add_special_tokens)
        if not images:
            return Expanded(ids=ids, spans=())
        out: array[int] = array(ids.typecode)
        spans: list[Span] = []
        for piece, tag in self._pieces(codec, ids):
            out += codec.encode(piece, add_special_tokens=True)
            number = _number(tag)
            following = len(spans) + 1
            if number is not None and following < number <= len(images):
                raise PlaceholderError(f"the prompt names {tag} before <|image_{following}|>")
            if number is not None and following == number <= len(images):
                image = images[number - 1]
                spans.append(Span(offset=len(out), length=image.count, identity=image.identity))
                out += placeholder_run(ids.typecode, self.placeholder_id, number - 1, image)
            elif tag:
                out += codec.encode(tag, add_special_tokens=False)
        if len(spans) < len(images):
            raise PlaceholderError(f"the prompt has a place for {len(spans)} images, the request has {len(images)}")
        return Expanded(ids=out, spans=tuple(spans))

    @staticmethod
    def _pieces(codec: "TokenizerCodec", ids: "array[int]") -> Iterator[tuple[str, str]]:
        """Yield each piece of the prompt with the tag that follows it; the last one has none."""
        begins = bool(ids) and ids[0] == codec.begin_id
        text = codec.decode(ids[1:] if begins else ids)
        for special in codec.special_texts:
            text = text.replace(f"{special} ", special)
        start = 0
        for tag in _TAG.finditer(text):
            yield text[start : tag.start()], tag[0]
            start = tag.end()
        yield text[start:], ""


def _number(tag: str) -> int | None:
    """Return the number of a tag as the engine writes it; ``<|image_01|>`` and other digits are no image's tag."""
    digits = tag.removeprefix("<|image_").removesuffix("|>")
    if len(digits) > _MOST_DIGITS or not digits.isascii() or digits[:1] in ("", "0"):
        return None
    return int(digits)


def tiles(width: int, height: int, num_crops: int) -> tuple[int, int]:
    """Return (rows, columns) of tiles that an image is resized to and padded to.

    The longer side gets as many tiles as fit with at most ``num_crops`` in all. Raises :class:`ImageSizeError` for an
    empty image and for one whose shorter side becomes no pixel.
    """
    if width < 1 or height < 1:
        raise ImageSizeError(f"an image of {width}x{height} pixels is empty")
    ratio = max(width, height) / min(width, height)
    long = 1
    while (long + 1) * math.ceil((long + 1) / ratio) <= num_crops:
        long += 1
    pixels = int(long * TILE / ratio)
    if pixels < 1:
        raise ImageSizeError(f"an image of {width}x{height} pixels: nothing would be left of its shorter side")
    short = math.ceil(pixels / TILE)
    return (short, long) if width >= height else (long, short)


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> Phi3V:
    """Return the family of a folder. Raises :class:`ModelFolderError` for a geometry that vLLM does not compute."""
    refuse_options(limits, "min_pixels", "max_pixels", family=MODEL_TYPE)
    file, values = image_processor(folder)
    tower = config.get("img_processor") or {}
    for name, holder in ((file, values), (f"{folder / 'config.json'}: img_processor", tower)):
        if not isinstance(holder, dict) or holder.get("num_img_tokens", _TILE_TOKENS) != _TILE_TOKENS:
            raise ModelFolderError(f"{name}: num_img_tokens other than {_TILE_TOKENS} is not modelled")
    if (find_json(folder, "tokenizer_config.json") or {}).get("clean_up_tokenization_spaces"):
        raise ModelFolderError(f"{folder / 'tokenizer_config.json'}: clean_up_tokenization_spaces is not modelled")
    crops = whole_number(file, values, "num_crops", 1)  # the image processor class's own default
    return Phi3V(crops if limits is None or limits.num_crops is None else limits.num_crops)


register(MODEL_TYPE, load, proved_on=("vllm",))
