"""Requests of a chat that several vLLM engines serve together, and what each tells the next.

See docs/engine-facts/vllm.md#encoder-disaggregation.

An encoder gets the images alone, a prefill engine the chat with one token to make, a decode engine the chat as the
client sent it. What they tell each other is passed on untouched: only where an image stands in the whole prompt is
said anew, because each encoder saw its own images only.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from mmrouter_lib.engines.base.request import ImageRewrite

_REMOTE_DECODE: Final = {"do_remote_decode": True, "do_remote_prefill": False}
_ONE_TOKEN: Final = {"max_tokens": 1, "max_completion_tokens": 1}
_DROPPED: Final = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "n", "best_of")
"""What only concerns the answer, which the prefill's is not."""


class StageError(Exception):
    """An engine's answer does not tell the next one what it needs; the message says what is missing."""


class _Encoded(msgspec.Struct):
    ec_transfer_params: dict[str, dict[str, Any]] | None = None


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def why_whole(body: Mapping[str, Any]) -> str | None:
    """Return why one engine has to do prefill and decode of a chat itself, ``None`` where two can.

    Several answers are several requests inside the engine, of which only the first finds the blocks; tokens of the
    prompt with their probabilities come only from who computed them.
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
    """Return the chat that has an encoder encode these images, in this order, and nothing else."""
    parts = [{"type": "image_url", "image_url": {"url": image.url}, "uuid": image.uuid} for image in images]
    return {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 1, "stream": False}


def read_encoded(raw: bytes, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return identity -> parameters of an encoder's answer. Raises :class:`StageError` where one of ``names`` lacks."""
    try:
        found = msgspec.json.decode(raw, type=_Encoded).ec_transfer_params or {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StageError(f"the encoder's answer cannot be read: {error}") from error
    missing = next((name for name in names if name not in found), None)
    if missing is not None:
        raise StageError(f"the encoder's answer does not have image {missing}")
    return {name: found[name] for name in names}


def embedding_bytes(params: Mapping[str, Any]) -> int:
    """Return the size of an embedding by what its encoder said of it; 0 where its connector says nothing."""
    size = params.get("size_bytes")
    return size if isinstance(size, int) and size > 0 else 0


def with_embeddings(
    body: Mapping[str, Any], encoded: Mapping[str, Mapping[str, Any]], order: Sequence[str]
) -> dict[str, Any]:
    """Return a chat that says where its images' embeddings are.

    ``encoded``: identity -> parameters, of any number of encoders. ``order``: the prompt's images, repeats among them.
    An image that nobody encoded is left out: the engine encodes it from the bytes, which are always there.
    """
    places: dict[str, list[int]] = {}
    for place, name in enumerate(order):
        places.setdefault(name, []).append(place)
    params = {name: {**encoded[name], "item_indices": at} for name, at in places.items() if name in encoded}
    return {**body, "ec_transfer_params": params} if params else dict(body)


def prefill_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat that has an engine compute the prompt and keep its blocks for another."""
    kept = {name: value for name, value in body.items() if name not in _DROPPED and name not in _ONE_TOKEN}
    wanted = {name: value for name, value in _ONE_TOKEN.items() if name in body} or {"max_tokens": 1}
    return {**kept, **wanted, "stream": False, "kv_transfer_params": dict(_REMOTE_DECODE)}


def read_prefilled(raw: bytes) -> dict[str, Any]:
    """Return the parameters of a prefill's answer. Raises :class:`StageError` where it holds no blocks for another."""
    try:
        params = msgspec.json.decode(raw, type=_Prefilled).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StageError(f"the prefill's answer cannot be read: {error}") from error
    if not params or not params.get("do_remote_prefill"):
        raise StageError("the prefill's answer names no blocks: does its pool have a connector?")
    return params


def decode_request(body: Mapping[str, Any], prefilled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat that has an engine fetch a prompt's blocks and answer."""
    return {**body, "kv_transfer_params": dict(prefilled)}
