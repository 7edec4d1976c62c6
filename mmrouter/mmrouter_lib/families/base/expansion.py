"""Expand placeholder tokens: one per image -> the ids that the engine computes with, and the span of each image."""

from array import array
from collections.abc import Sequence

from mmrouter_lib.block_keys import Span
from mmrouter_lib.families.base.family import Codec, Expanded, PlaceholderError, PromptImage
from mmrouter_lib.model_folder import ModelFolderError


class SinglePlaceholder:
    """Base of families whose placeholder is one token of the vocabulary: tokenize once, then replace the tokens."""

    __slots__ = ()

    placeholder_id: int
    placeholder_text: str

    @property
    def rotates_exif(self) -> bool:
        """vLLM applies the EXIF orientation while it loads an image, before its processor counts."""
        return True

    @property
    def fragile(self) -> bool:
        return False

    def check(self, codec: Codec) -> None:
        """Raise :class:`ModelFolderError` for a tokenizer that has the placeholder under another id."""
        token = codec.token_id(self.placeholder_text)
        if token != self.placeholder_id:
            raise ModelFolderError(
                f"the tokenizer has {self.placeholder_text!r} as {token}, config.json as {self.placeholder_id}"
            )

    def expand(self, codec: Codec, text: str, images: Sequence[PromptImage], *, add_special_tokens: bool) -> Expanded:
        """Return the expanded prompt, as :func:`expand_ids` has it."""
        ids = codec.encode(text, add_special_tokens=add_special_tokens)
        return expand_ids(ids, self.placeholder_id, images)


def expand_ids(ids: "array[int]", placeholder: int, images: Sequence[PromptImage]) -> Expanded:
    """Replace each of the first ``len(images)`` placeholders by a run of its image's length.

    The engine matches by position alone: a placeholder that a user typed takes an image from the template's own, which
    then stays a plain token (tests/conformance/vllm/test_tokenization.py). Raises :class:`PlaceholderError` when there
    are more images than placeholders, or an image of less than one token.
    """
    out: array[int] = array(ids.typecode)
    spans: list[Span] = []
    done = 0
    for number, image in enumerate(images):
        at = _find(ids, placeholder, done)
        if at is None:
            raise PlaceholderError(f"the prompt has a place for {number} images, the request has {len(images)}")
        out += ids[done:at]
        spans.append(Span(offset=len(out), length=image.count, identity=image.identity))
        out += placeholder_run(ids.typecode, placeholder, number, image)
        done = at + 1
    left = _find(ids, placeholder, done)
    unplaced = None if left is None else len(out) + left - done
    out += ids[done:]
    return Expanded(ids=out, spans=tuple(spans), unplaced=unplaced)


def placeholder_run(typecode: str, placeholder: int, number: int, image: PromptImage) -> "array[int]":
    """Return the placeholder tokens of image ``number``. Raises :class:`PlaceholderError` for less than one token."""
    if image.count < 1:
        raise PlaceholderError(f"image {number} has {image.count} tokens: at least one is needed")
    return array(typecode, [placeholder]) * image.count


def _find(ids: "array[int]", value: int, start: int) -> int | None:
    try:
        return ids.index(value, start)
    except ValueError:
        return None
