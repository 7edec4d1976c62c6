"""Requests to vLLM's renderer, and its answers (docs/engine-facts/vllm.md#renderer).

``POST /v1/chat/completions/render`` processes a chat request without running the model. The answer names images by the
``uuid`` in the request, so its ids and placeholders are enough to compute block keys.
"""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from mmrouter_lib.block_keys import Span
from mmrouter_lib.media_identity import from_wire

RENDER_PATH = "/v1/chat/completions/render"


class RenderError(ValueError):
    """The renderer's answer cannot be used; the message says why."""


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Place]] = {}


class _Answer(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


def render_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for a chat body that ``rewrite_chat`` made; the answer then holds no processed tensors."""
    dropped = ("stream", "stream_options", "cache_salt", "return_token_ids")  # without effect on the prompt
    return {**{key: value for key, value in body.items() if key not in dropped}, "mm_payload": "none"}


def read_rendered(raw: bytes) -> tuple["array[int]", tuple[Span, ...]]:
    """Return token ids (u32) and the images' spans, in prompt order.

    Raises :class:`RenderError` for an answer of another shape, for media other than images, and for an image that
    carries no identity of this project or lies outside the prompt.
    """
    try:
        answer = msgspec.json.decode(raw, type=_Answer)
        ids = array("I", answer.token_ids)
    except (msgspec.DecodeError, OverflowError) as error:
        raise RenderError(f"not a rendered prompt: {error}") from error
    features = answer.features or _Features()
    if others := {*features.mm_hashes, *features.mm_placeholders} - {"image"}:
        raise RenderError(f"the prompt holds {sorted(others)[0]}, which is not modelled")
    names, places = features.mm_hashes.get("image", []), features.mm_placeholders.get("image", [])
    if len(names) != len(places):
        raise RenderError(f"{len(names)} images are named, {len(places)} have a position")
    spans: list[Span] = []
    for name, place in zip(names, places, strict=True):
        identity = from_wire(name)
        if identity is None:
            raise RenderError(f"an image is named {name[:80]!r}, which is no identity of mmrouter")
        if place.offset < 0 or place.length < 1 or place.offset + place.length > len(ids):
            raise RenderError(f"an image is at {place.offset}+{place.length} of {len(ids)} tokens")
        spans.append(Span(place.offset, place.length, identity))
    return ids, tuple(sorted(spans, key=lambda span: span.offset))
