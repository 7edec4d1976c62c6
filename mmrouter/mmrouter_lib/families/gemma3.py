"""Gemma 3 without pan-and-scan: every image becomes one square picture of as many tokens, between two blank lines.

vLLM 0.32 replaces the begin-of-image token in the prompt's ids, then joins newline tokens that have come to stand side
by side, as the tokenizer would. Adjacent images share such a token, and a text that begins with a newline behind an
image hides where it ends: neither is modelled. SGLang 0.5.23 tokenizes a text that has the images' tokens already, and
names an image by its pictures' tokens alone, so both are exact there.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from mmrouter_lib.block_keys import Span
from mmrouter_lib.families.base.family import (
    Expanded,
    Family,
    ImageSizeError,
    NotModelledError,
    PlaceholderError,
    ProcessorLimits,
    PromptImage,
    expand_ids,
    refuse_options,
    register,
)
from mmrouter_lib.model_folder import ModelFolderError, find_json, image_processor, whole_number

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec

MODEL_TYPE = "gemma3"
BEGIN, PICTURE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
_PICTURE_TOKENS = 256  # of a picture, by default
_AROUND = 4  # begin and end of the image, and a blank line on both sides
_NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")


@dataclass(frozen=True, slots=True)
class Gemma3(Family):
    """A Gemma 3 folder. ``placeholder_id`` begins an image, ``picture_id`` fills it, ``end_id`` ends it."""

    placeholder_id: int
    picture_id: int
    end_id: int
    picture_tokens: int = _PICTURE_TOKENS
    placeholder_text: str = BEGIN
    name: str = MODEL_TYPE
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType({"image": BEGIN})

    def count(self, width: int, height: int) -> int:
        """Return the tokens of an image with what stands around it, the same for every size."""
        if width < 1 or height < 1:
            raise ImageSizeError(f"an image of {width}x{height} pixels is empty")
        return self.picture_tokens + _AROUND

    def expand(
        self, codec: "TokenizerCodec", text: str, images: Sequence[PromptImage], *, add_special_tokens: bool
    ) -> Expanded:
        """Return a prompt text's token ids with every image expanded.

        Raises :class:`PlaceholderError`, :class:`NotModelledError` for images whose places are not modelled.
        """
        ids = codec.encode(text, add_special_tokens=add_special_tokens)
        if not images:
            return Expanded(ids=ids, spans=())
        one, two, three, four = (codec.token_id(newlines) for newlines in _NEWLINES)
        if one is None or two is None or three is None or four is None:
            raise NotModelledError("the tokenizer has no token for up to four newlines")
        picture = [two, self.placeholder_id, *[self.picture_id] * self.picture_tokens, self.end_id, two]
        out = _replaced(ids, [self.placeholder_id], picture, most=len(images))
        for pair, joined in (([one, two], three), ([two, one], three), ([two, two], four)):
            out = _replaced(out, pair, [joined])
        spans: list[Span] = []
        done = 0
        for number, image in enumerate(images):
            try:
                offset = out.index(self.placeholder_id, done) - 1
            except ValueError:
                message = f"the prompt has a place for {number} images, the request has {len(images)}"
                raise PlaceholderError(message) from None
            span = Span(offset=offset, length=len(picture), identity=image.identity)
            if offset < done or out[span.end - 1] not in (two, four):
                raise NotModelledError("newlines of images are joined with each other or with what follows")
            spans.append(span)
            done = span.end
        return Expanded(ids=out, spans=tuple(spans))

    def expand_text(
        self, codec: "TokenizerCodec", text: str, images: Sequence[PromptImage], *, add_special_tokens: bool
    ) -> Expanded:
        """Return the token ids of a text into which the images' tokens and newlines are written before.

        Raises :class:`PlaceholderError`, :class:`NotModelledError` for a tokenizer with other tokens.
        """
        if images and (codec.token_id(PICTURE), codec.token_id(END)) != (self.picture_id, self.end_id):
            raise NotModelledError("the tokenizer has other tokens for images than config.json")
        # One token stands for the picture's, which no text joins, so that a long text is not made longer.
        shown = text.replace(BEGIN, f"\n\n{BEGIN}{PICTURE}{END}\n\n", len(images))
        ids = codec.encode(shown, add_special_tokens=add_special_tokens)
        return expand_ids(
            ids, self.picture_id, images, [array("I", [self.picture_id]) * self.picture_tokens] * len(images)
        )


def _replaced(ids: "array[int]", sought: list[int], by: list[int], most: int = -1) -> "array[int]":
    """Replace the first ``most`` occurrences of some tokens, from left to right; -1 replaces all."""
    out: array[int] = array(ids.typecode)
    wanted, new = array(ids.typecode, sought), array(ids.typecode, by)
    done = at = 0
    while most:
        try:
            at = ids.index(sought[0], at)
        except ValueError:
            break
        if ids[at : at + len(wanted)] != wanted:
            at += 1
            continue
        out += ids[done:at] + new
        done = at = at + len(wanted)
        most -= 1
    return out + ids[done:]


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> Gemma3 | None:
    """Return the family of a folder, ``None`` with pan-and-scan. Raises :class:`ModelFolderError`."""
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=MODEL_TYPE)
    file, processor = str(folder / "config.json"), image_processor(folder)[1]
    if processor.get("do_pan_and_scan"):
        return None
    written = find_json(folder, "processor_config.json") or {}
    tokens = whole_number(str(folder / "processor_config.json"), written, "image_seq_length", _PICTURE_TOKENS)
    if whole_number(file, config, "mm_tokens_per_image", _PICTURE_TOKENS) != tokens:
        raise ModelFolderError(f"{folder / 'processor_config.json'}: image_seq_length {tokens} is not config.json's")
    begin = whole_number(file, config, "boi_token_index", 255_999)
    end = whole_number(file, config, "eoi_token_index", 256_000)
    key = "image_token_id" if "image_token_id" in config else "image_token_index"
    return Gemma3(begin, whole_number(file, config, key, 262_144), end, tokens)


register(MODEL_TYPE, load, proved_on=("vllm", "sglang"))
