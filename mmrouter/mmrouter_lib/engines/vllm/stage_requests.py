"""Requests of the render, encode, prefill and decode stages of a chat that several vLLM engines serve together.

An encoder gets the images alone, a prefill engine the chat with one token to generate, a decode engine the chat as the
client sent it. Transfer parameters are passed on unchanged, except each image's position in the prompt, because an
encoder saw only its own images (docs/engine-facts/vllm.md#encoder-disaggregation,
docs/engine-facts/vllm.md#prefill-decode).

vLLM's renderer processes a chat without running the model (docs/engine-facts/vllm.md#renderer). Its answer names images
by the ``uuid`` in the request, so its ids and placeholders are enough to compute block keys.
"""

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.base.adapter import ImageRewrite
from mmrouter_lib.media_identity import from_wire

_REMOTE_DECODE: Final = {"do_remote_decode": True, "do_remote_prefill": False}
_ONE_TOKEN: Final = {"max_tokens": 1, "max_completion_tokens": 1}
_DROPPED: Final = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "n", "best_of")
"""Fields of the answer, which the client gets from the decode engine."""


class StageError(Exception):
    """An engine's answer lacks what the next stage needs; the message says what."""


class _Encoded(msgspec.Struct):
    ec_transfer_params: dict[str, dict[str, Any]] | None = None


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def why_whole(body: Mapping[str, Any]) -> str | None:
    """Return why one engine has to do both prefill and decode of a chat, ``None`` where two can.

    Several answers are several requests inside the engine, of which only the first finds the blocks; log probabilities
    of the prompt come only from the engine that computed it.
    """
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            return "several_answers"
    if body.get("use_beam_search"):
        return "several_answers"
    if body.get("prompt_logprobs") not in (None, False, 0) or body.get("echo"):
        return "prompt_logprobs"
    return None


def encode_request(images: Sequence[ImageRewrite], *, model: str) -> dict[str, Any]:
    """Return the chat that makes an encoder encode these images, in this order."""
    parts = [{"type": "image_url", "image_url": {"url": image.url}, "uuid": image.uuid} for image in images]
    return {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 1, "stream": False}


def read_encoded(raw: bytes, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return identity -> parameters of an encoder's answer. Raises :class:`StageError` where one is missing."""
    try:
        encoded = msgspec.json.decode(raw, type=_Encoded).ec_transfer_params or {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StageError(f"the encoder's answer cannot be read: {error}") from error
    missing = next((name for name in names if name not in encoded), None)
    if missing is not None:
        raise StageError(f"the encoder's answer does not have image {missing}")
    return {name: encoded[name] for name in names}


def embedding_bytes(params: Mapping[str, Any]) -> int:
    """Return the size of an embedding from its parameters; 0 where the connector reports none."""
    size = params.get("size_bytes")
    return size if isinstance(size, int) and size > 0 else 0


def with_embeddings(
    body: Mapping[str, Any], encoded: Mapping[str, Mapping[str, Any]], order: Sequence[str]
) -> dict[str, Any]:
    """Return a chat with the parameters of its images' embeddings.

    ``encoded``: identity -> parameters, of any number of encoders. ``order``: the prompt's images, with repeats. Images
    without parameters are left out: the engine encodes them from the bytes, which the chat always carries.
    """
    places: dict[str, list[int]] = {}
    for place, name in enumerate(order):
        places.setdefault(name, []).append(place)
    params = {name: {**encoded[name], "item_indices": at} for name, at in places.items() if name in encoded}
    return {**body, "ec_transfer_params": params} if params else dict(body)


def prefill_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat that makes an engine compute the prompt and hold its blocks for another."""
    fields = {name: value for name, value in body.items() if name not in _DROPPED and name not in _ONE_TOKEN}
    wanted = {name: value for name, value in _ONE_TOKEN.items() if name in body} or {"max_tokens": 1}
    return {**fields, **wanted, "stream": False, "kv_transfer_params": dict(_REMOTE_DECODE)}


def read_prefilled(raw: bytes) -> dict[str, Any]:
    """Return the parameters of a prefill's answer. Raises :class:`StageError` where it holds no blocks."""
    try:
        params = msgspec.json.decode(raw, type=_Prefilled).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StageError(f"the prefill's answer cannot be read: {error}") from error
    if not params or not params.get("do_remote_prefill"):
        raise StageError("the prefill's answer names no blocks: does its pool have a connector?")
    return params


LEASE_SECONDS: Final = 30.0
"""NixlConnector's own ``kv_lease_duration``."""
MAX_ENGINES: Final = 4096  # prefill engines whose clock differences are kept
RECENT: Final = 64  # differences kept of each


def lease_seconds(connector: Mapping[str, Any]) -> float | None:
    """Return how long a prefill engine holds blocks for a reader, by ``engine.kvConnector``; ``None``: unknown."""
    if connector.get("kv_connector", "NixlConnector") != "NixlConnector":
        return None
    extra = connector.get("kv_connector_extra_config")
    seconds = extra.get("kv_lease_duration", LEASE_SECONDS) if isinstance(extra, Mapping) else LEASE_SECONDS
    return float(seconds) if isinstance(seconds, (int, float)) and seconds > 0 else None


class BlockLeases:
    """Deadlines by which a decode engine must have a request to find the prefilled blocks, by this process's clock.

    The deadline is a sixth of the lease before its end, because a decode engine renews the lease at this interval
    (docs/engine-facts/vllm.md#prefill-decode). ``remote_blocks_expiry_time`` is a time of the prefill engine's own
    monotonic clock. Its largest difference from the arrival of a recent answer, that of the least delayed one, is taken
    as the lease plus the difference of both clocks. Older answers do not count, because clocks drift, and stop with a
    virtual machine that is moved.
    """

    def __init__(self, seconds: float | None) -> None:
        """``seconds``: the lease; ``None`` if it is unknown."""
        self._seconds = seconds
        self._ahead: dict[str, deque[float]] = {}

    def deadline(self, engine: str, params: Mapping[str, Any], received: float) -> float | None:
        """Return when a decode engine must have a request; ``None`` where the lease is unknown.

        ``engine``: its id, which changes with a restart. ``received``: when the prefill's answer was complete.
        """
        if self._seconds is None:
            return None
        ends, expiry = received + self._seconds, params.get("remote_blocks_expiry_time")
        if isinstance(expiry, (int, float)):
            if engine not in self._ahead and len(self._ahead) >= MAX_ENGINES:
                self._ahead.clear()
            ahead = self._ahead.setdefault(engine, deque(maxlen=RECENT))
            ahead.append(expiry - received)
            ends = expiry - max(ahead) + self._seconds
        return ends - self._seconds / 6


def decode_request(body: Mapping[str, Any], prefilled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat that makes an engine fetch a prompt's blocks and answer."""
    return {**body, "kv_transfer_params": dict(prefilled)}


RENDER_PATH = "/v1/chat/completions/render"


_KINDS = ("image", "video", "audio")


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
    """Return token ids (u32) and the spans of images, videos and audio, in prompt order.

    Raises :class:`RenderError` for an answer of another shape, for media of other kinds, and for an image that
    carries no identity of this project or lies outside the prompt.
    """
    try:
        answer = msgspec.json.decode(raw, type=_Answer)
        ids = array("I", answer.token_ids)
    except (msgspec.DecodeError, OverflowError) as error:
        raise RenderError(f"not a rendered prompt: {error}") from error
    features = answer.features or _Features()
    if others := {*features.mm_hashes, *features.mm_placeholders} - set(_KINDS):
        raise RenderError(f"the prompt holds {sorted(others)[0]}, which is not modelled")
    names, places = list[str](), list[_Place]()
    for kind in _KINDS:
        names += features.mm_hashes.get(kind, [])
        places += features.mm_placeholders.get(kind, [])
        if len(names) != len(places):
            raise RenderError(f"{len(names)} {kind}s are named, {len(places)} have a position")
    spans: list[Span] = []
    for name, place in zip(names, places, strict=True):
        identity = from_wire(name)
        if identity is None:
            raise RenderError(f"an image is named {name[:80]!r}, which is no identity of mmrouter")
        if place.offset < 0 or place.length < 1 or place.offset + place.length > len(ids):
            raise RenderError(f"an image is at {place.offset}+{place.length} of {len(ids)} tokens")
        spans.append(Span(place.offset, place.length, identity))
    return ids, tuple(sorted(spans, key=lambda span: span.offset))
