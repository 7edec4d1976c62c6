"""InternVL as its authors publish it: images as in Hugging Face's format, whose place is a text and no token.

Covers ``internvl_chat`` on vLLM, 0.30 to 0.33, where the language model's tokenizer is tokenizer.json: InternVL 3 and
3.5 with Qwen2.5 and Qwen3. vLLM looks for the tokens of ``<image>`` in the prompt. Beside other characters the text has
other tokens; where the prompt lacks them for one of the images, vLLM decodes it, replaces the text, and tokenizes the
whole anew (``BaseMultiModalProcessor._apply_prompt_updates``).
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
from mmrouter_lib.families.internvl import BEGIN, END, InternVL
from mmrouter_lib.model_folder import (
    ModelFolderError,
    added_token_id,
    find_json,
    has_tokenizer_code,
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
        """Raise :class:`ModelFolderError` for a tokenizer that changes the texts around an image's tokens."""
        InternVL.check(self, codec)
        texts = ("a ", f"{BEGIN}{CONTEXT}{END}", " a")
        before, image, behind = [codec.encode(text, add_special_tokens=False).tolist() for text in texts]
        if (
            len(image) != 3
            or codec.encode("".join(texts), add_special_tokens=False).tolist() != before + image + behind
        ):
            raise ModelFolderError(f"the tokenizer joins {BEGIN}, {CONTEXT} or {END} with the text around it")

    def expand(
        self, codec: "TokenizerCodec", text: str, images: Sequence[PromptImage], *, add_special_tokens: bool
    ) -> Expanded:
        """Return the expanded prompt. Raises :class:`PlaceholderError` for fewer texts than images, and
        :class:`NotModelledError` where a user typed the token that images become.
        """
        ids = codec.encode(text, add_special_tokens=add_special_tokens)
        pieces = _cut(ids, codec.encode(IMAGE, add_special_tokens=False), len(images))
        if len(pieces) <= len(images):
            texts = codec.decode(ids).split(IMAGE, len(images))
            pieces = [codec.encode(piece, add_special_tokens=False) for piece in texts]
            if len(pieces) <= len(images):
                have = len(pieces) - 1
                raise PlaceholderError(f"the prompt has a place for {have} images, the request has {len(images)}")
            if any(self.placeholder_id in piece for piece in pieces):
                raise NotModelledError(f"the prompt has {CONTEXT} beside its images")
        out, spans = pieces[0][:], list[Span]()
        for number, (image, piece) in enumerate(zip(images, pieces[1:], strict=True)):
            run = array(ids.typecode, self.tokens(codec, image, number))
            spans.append(Span(offset=len(out), length=len(run), identity=image.identity))
            out += run + piece
        return Expanded(ids=out, spans=tuple(spans))


def _cut(ids: "array[int]", target: "array[int]", most: int) -> "list[array[int]]":
    """Return the pieces of a prompt between the first ``most`` places of the target's tokens."""
    pieces: list[array[int]] = []
    start = at = 0
    while len(pieces) < most and (at := _index(ids, target[0], at)) < len(ids):
        found = ids[at : at + len(target)] == target
        if found:
            pieces.append(ids[start:at])
        at += len(target) if found else 1
        start = at if found else start
    return [*pieces, ids[start:]]


def _index(ids: "array[int]", value: int, start: int) -> int:
    """Return the first index of a value from ``start`` on, the length where there is none."""
    try:
        return ids.index(value, start)
    except ValueError:
        return len(ids)


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> InternVLChat | None:
    """Return the family of a folder, ``None`` for a tokenizer that is code of its own.

    Raises :class:`ModelFolderError` for a geometry that is not modelled.
    """
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=MODEL_TYPE)
    file, described = str(folder / "config.json"), find_json(folder, "tokenizer_config.json") or {}
    if has_tokenizer_code(described):
        return None
    if described.get("clean_up_tokenization_spaces"):
        raise ModelFolderError(f"{folder / 'tokenizer_config.json'}: clean_up_tokenization_spaces is not modelled")
    if config.get("use_thumbnail") is not True:
        raise ModelFolderError(f"{file}: use_thumbnail must be true, not {config.get('use_thumbnail')!r}")
    vision, ratio = vision_config(file, config), config.get("downsample_ratio")
    if not isinstance(ratio, float) or not 0 < ratio <= 1:
        raise ModelFolderError(f"{file}: downsample_ratio must be above 0 and at most 1, not {ratio!r}")
    tile, patch = (whole_number(file, vision, key) for key in ("image_size", "patch_size"))
    tokens, token = int((tile // patch) ** 2 * ratio**2), added_token_id(folder, CONTEXT)
    if token is None or tokens < 1:
        wanted = f"the tokenizer has no token {CONTEXT}" if token is None else "a tile becomes no token"
        raise ModelFolderError(f"{file}: {wanted}")
    least, most = (whole_number(file, config, f"{name}_dynamic_patch") for name in ("min", "max"))
    return InternVLChat(token, tile, tokens, *((least, most) if config.get("dynamic_image_size") else (1, 1)))


register(MODEL_TYPE, load, proved_on=("vllm",))
