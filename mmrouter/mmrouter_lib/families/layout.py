"""Token ids with one placeholder per image -> the ids that the engine computes with, and where each image stands."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from mmrouter_lib.block_keys import Span


class PlaceholderError(ValueError):
    """The placeholders in the prompt do not fit the images of the request."""


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a request: its media identity (32 bytes) and the number of placeholder tokens it becomes.

    Every image of the request has one, because that there are images can change how the text is tokenised (Phi-3): one
    that cannot be resolved is given with one token and an identity that nothing else has.
    """

    identity: bytes
    count: int


@dataclass(frozen=True, slots=True)
class Expanded:
    """An expanded prompt: ``ids`` (u32) and one span per image, in prompt order.

    ``unplaced`` is the offset of the first placeholder that no image took, ``None`` when there is none: one that a user
    typed, or, when only the resolved images of a request were given, that of the first unresolved one.
    """

    ids: "array[int]"
    spans: tuple[Span, ...]
    unplaced: int | None


def expand_ids(ids: "array[int]", placeholder: int, images: Sequence[PromptImage]) -> Expanded:
    """Replace each of the first ``len(images)`` placeholders by a run of its image's length.

    The engine matches by position alone: a placeholder that a user typed takes an image from the template's own, which
    then stays a plain token (facts on routing, test 37). Raises :class:`PlaceholderError` when there are more images
    than placeholders, or an image of less than one token.
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
        out += run(ids.typecode, placeholder, number, image)
        done = at + 1
    left = _find(ids, placeholder, done)
    unplaced = None if left is None else len(out) + left - done
    out += ids[done:]
    return Expanded(ids=out, spans=tuple(spans), unplaced=unplaced)


def run(typecode: str, placeholder: int, number: int, image: PromptImage) -> "array[int]":
    """Return the placeholder tokens of image ``number``. Raises :class:`PlaceholderError` for less than one token."""
    if image.count < 1:
        raise PlaceholderError(f"image {number} has {image.count} tokens: at least one is needed")
    return array(typecode, [placeholder]) * image.count


def _find(ids: "array[int]", value: int, start: int) -> int | None:
    try:
        return ids.index(value, start)
    except ValueError:
        return None
