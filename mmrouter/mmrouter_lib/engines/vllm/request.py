"""Chat requests to vLLM: what the router sets, what clients may not set, and which field an error is about."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmrouter_lib.engines.base.request_rewriting import (
    ImageRewrite,
    Removed,
    Rewritten,
    error_of,
    rewrite_messages,
    without,
)

REFUSED_FIELDS = (
    "cache_salt",
    "mm_hashes",
    "content_hash",
    "extra_key",
    "kv_transfer_params",
    "ec_transfer_params",
    "request_id",  # a client could choose that of another tenant
)
"""Body fields that steer caches, transfers or other tenants' requests; only the router sets them."""

REFUSED_XARGS = ("kv_cache_report_mode", "kv_transfer_params", "ec_transfer_params")
"""Keys of ``vllm_xargs``. A report of reused blocks looks like new copies
(docs/engine-facts/vllm.md#what-publishes-no-events)."""


def rewrite_chat(
    body: Mapping[str, Any], images: Sequence[ImageRewrite], *, model: str, cache_salt: str | None
) -> Rewritten:
    """Return the body that the engine gets; ``body`` stays as it is, and unchanged values are shared with it.

    ``uuid`` stands beside ``image_url``; vLLM ignores it inside that object (docs/engine-facts/vllm.md#image-uuid).
    Raises ``ValueError`` when an image names a part that does not exist.
    """
    new, removed = rewrite_messages(body, images, REFUSED_FIELDS, _rewrite_part, model=model, cache_salt=cache_salt)
    xargs = new.get("vllm_xargs")
    if isinstance(xargs, dict):
        new["vllm_xargs"] = without(xargs, REFUSED_XARGS, "vllm_xargs.", removed)
    return Rewritten(new, tuple(removed))


def _rewrite_part(part: dict[str, Any], image: ImageRewrite | None, removed: Removed) -> dict[str, Any]:
    part = without(part, ("uuid",), "", removed)
    if image is None:
        return part
    old = part.get("image_url")
    fields = without(old, ("uuid",), "image_url.", removed) if isinstance(old, dict) else {}
    return {**part, "type": "image_url", "image_url": {**fields, "url": image.url}, "uuid": image.uuid}


_PARAMETER = re.compile(r"\(parameter=([A-Za-z_][\w.]*)")
_ABOUT_MESSAGES = re.compile(
    r"Cache miss for \w+ at index"
    r"|Failed to (?:apply|load image|load audio)"
    r"|(?:prompt|input)[^.]* (?:is )?longer than the maximum model length"
    r"|maximum context length"
    r"|prompt cannot be empty"
    r"|may be provided in one prompt"
    r"|cannot identify image file"
    r"|exceeds the pre-allocated encoder cache",
    re.IGNORECASE,
)
_PARAM_NAMES = dict.fromkeys(("image", "video", "audio", "input_text", "input_tokens"), "messages")
"""Parameters that vLLM names after its own arguments -> the client's field."""


def prompt_error_field(status: int, body: Mapping[str, Any]) -> str | None:
    """Return the request field that a vLLM error answer is about, ``None`` if unknown.

    ``status`` is the HTTP status, ``body`` the decoded answer. vLLM leaves ``param`` null for most errors of images and
    prompts, so their sentences are recognized (docs/engine-facts/vllm.md#requests-that-end-the-engine).
    """
    if status < 400:
        return None
    error = error_of(body)
    message, param = error.get("message"), error.get("param")
    if not isinstance(param, str) or not param:
        named = _PARAMETER.search(message) if isinstance(message, str) else None
        param = named[1] if named else None
    if param is not None:
        param = param.removeprefix("body.")
        return _PARAM_NAMES.get(param, param)
    if isinstance(message, str) and _ABOUT_MESSAGES.search(message):
        return "messages"
    return None
