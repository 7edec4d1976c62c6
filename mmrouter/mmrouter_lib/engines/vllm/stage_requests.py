"""Requests of the encode, prefill and decode stages of a chat that several vLLM engines serve together.

An encoder gets the images alone, a prefill engine the chat with one token to generate, a decode engine the chat as the
client sent it. Transfer parameters are passed on unchanged, except each image's position in the prompt, because an
encoder saw only its own images (docs/engine-facts/vllm.md#encoder-disaggregation,
docs/engine-facts/vllm.md#prefill-decode).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from mmrouter_lib.engines.base.request_rewriting import ImageRewrite

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


def decode_request(body: Mapping[str, Any], prefilled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat that makes an engine fetch a prompt's blocks and answer."""
    return {**body, "kv_transfer_params": dict(prefilled)}
