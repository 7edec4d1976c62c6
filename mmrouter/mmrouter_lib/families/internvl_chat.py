"""InternVL as its authors publish it: images as in Hugging Face's format, whose place is a text and no token.

Covers ``internvl_chat`` on vLLM 0.30 to 0.33: InternVL 3 and 3.5 with Qwen2.5 and Qwen3, whose folders have vocab.json
and merges.txt and no tokenizer.json. vLLM looks for the tokens of ``<image>`` in the prompt. Beside other characters
the text has other tokens; where the prompt lacks them for one of the images, vLLM decodes it, replaces the text, and
tokenizes the whole anew (``BaseMultiModalProcessor._apply_prompt_updates``). SGLang has rules of its own
(``mmrouter_lib.engines.sglang.families.internvl``).
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
    NotModelledError,
    PlaceholderError,
    ProcessorLimits,
    PromptImage,
    refuse_options,
    register,
)
from mmrouter_lib.families.base.layout import special_id
from mmrouter_lib.families.internvl import BEGIN, END, InternVL, tile_tokens
from mmrouter_lib.model_folder import (
    ModelFolderError,
    added_token_id,
    has_lossless_tokenizer,
    vision_config,
    whole_number,
)

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec

MODEL_TYPE = "internvl_chat"
IMAGE, CONTEXT = "<image>", "<IMG_CONTEXT>"


@dataclass(frozen=True, slots=True)
class InternVLChat(InternVL):
    """An InternVL folder of its authors; the fields are InternVL's."""

    name: str = MODEL_TYPE
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType({"image": IMAGE, "video": "<video>"})

    def check(self, codec: "TokenizerCodec") -> None:
        """Raise :class:`ModelFolderError` for a tokenizer that joins an image's tokens with one another."""
        InternVL.check(self, codec)
        begin, end = special_id(codec, BEGIN), special_id(codec, END)
        image = codec.encode(f"a{BEGIN}{CONTEXT}{CONTEXT}{END}a", add_special_tokens=False).tolist()
        if image[1:-1] != [begin, self.placeholder_id, self.placeholder_id, end]:
            raise ModelFolderError(f"the tokenizer joins {BEGIN}, {CONTEXT} and {END}, or does not find them")

    def expand(
        self, codec: "TokenizerCodec", text: str, images: Sequence[PromptImage], *, add_special_tokens: bool
    ) -> Expanded:
        """Return the expanded prompt. Raises :class:`PlaceholderError` for fewer texts than images, and
        :class:`NotModelledError` where a user typed the token that images become.
        """
        ids = codec.encode(text, add_special_tokens=add_special_tokens)
        pieces = _cut(ids, codec.encode(IMAGE, add_special_tokens=False), len(images))
        if len(pieces) <= len(images):
            pieces = self._cut_anew(codec, codec.decode(ids), len(images))
        out, spans = pieces[0][:], list[Span]()
        for number, (image, piece) in enumerate(zip(images, pieces[1:], strict=True)):
            run = array(ids.typecode, self.tokens(codec, image, number))
            spans.append(Span(offset=len(out), length=len(run), identity=image.identity))
            out += run + piece
        return Expanded(ids=out, spans=tuple(spans))

    def _cut_anew(self, codec: "TokenizerCodec", text: str, images: int) -> "list[array[int]]":
        """Return the pieces between images of a prompt that is tokenized with them in it, as one token each: further
        ones change no other token.
        """
        texts = text.split(IMAGE, images)
        if len(texts) <= images:
            raise PlaceholderError(f"the prompt has a place for {len(texts) - 1} images, the request has {images}")
        ids = codec.encode(f"{BEGIN}{CONTEXT}{END}".join(texts), add_special_tokens=False)
        if ids.count(self.placeholder_id) != images:
            raise NotModelledError(f"the prompt has {CONTEXT} beside its images")
        image = array(ids.typecode, [special_id(codec, BEGIN), self.placeholder_id, special_id(codec, END)])
        return _cut(ids, image, images)


def _cut(ids: "array[int]", target: "array[int]", most: int) -> "list[array[int]]":
    """Return the pieces of a prompt between the first ``most`` places of the target's tokens."""
    pieces: list[array[int]] = []
    start = at = 0
    while len(pieces) < most:
        try:
            at = ids.index(target[0], at)
        except ValueError:
            break
        if ids[at : at + len(target)] == target:
            pieces.append(ids[start:at])
            start = at = at + len(target)
        else:
            at += 1
    return [*pieces, ids[start:]]


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> InternVLChat | None:
    """Return the family of a folder, ``None`` for a tokenizer that is not read and for tiles by other rules.

    Raises :class:`ModelFolderError` where its files contradict each other.
    """
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=MODEL_TYPE)
    file = str(folder / "config.json")
    if not has_lossless_tokenizer(folder) or config.get("use_thumbnail") is not True:
        return None
    # Of more tiles at least, vLLM takes grids of equal size in another order.
    if config.get("min_dynamic_patch") != 1 or not isinstance(config.get("max_dynamic_patch"), int):
        return None
    vision = vision_config(file, config)
    tile, patch = (whole_number(file, vision, key) for key in ("image_size", "patch_size"))
    if config.get("force_image_size", tile) != tile:
        return None
    tokens, token = tile_tokens(file, config, tile, patch), added_token_id(folder, CONTEXT)
    if token is None:
        raise ModelFolderError(f"{file}: the tokenizer has no token {CONTEXT}")
    most = whole_number(file, config, "max_dynamic_patch") if config.get("dynamic_image_size") else 1
    return InternVLChat(token, tile, tokens, 1, most)


register(MODEL_TYPE, load, proved_on=("vllm", "sglang"))
