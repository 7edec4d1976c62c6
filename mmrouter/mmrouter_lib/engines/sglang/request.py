"""Chat requests to SGLang: what the router sets, what clients may not set, and which field an error is about."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mmrouter_lib.engines.base.request_rewriting import (
    ImageRewrite,
    Removed,
    Rewritten,
    error_of,
    rewrite_messages,
    without,
)

REFUSED_FIELDS: Final = (
    # Ends Qwen3-VL engines, and lets one tenant name the pixels of another.
    "mm_hashes",
    "mm_content_hashes",
    "content_hash",
    "extra_key",
    "cache_salt",
    "input_ids",  # with it the engine drops the images of a chat
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "rid",  # a client could choose that of another tenant
    "session_id",
    "session_params",
    "lora_path",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
)
"""Body fields that steer caches, transfers or other tenants' requests; only the router sets them."""

REFUSED_PART_FIELDS: Final = ("content_hash", "uuid")
"""Fields of a content part and of its ``image_url`` that identify the content."""

REQUEST_ID_HEADER: Final = "x-override-rid"


def rewrite_chat(
    body: Mapping[str, Any], images: Sequence[ImageRewrite], *, model: str, cache_salt: str | None
) -> Rewritten:
    """Return the body that the engine gets; ``body`` stays as it is, and unchanged values are shared with it.

    Images become ``data:`` URIs of the bytes that were hashed. The engine has no field for an identity on this
    endpoint, so ``ImageRewrite.uuid`` is not sent. Raises ``ValueError`` when an image names a part that does not
    exist.
    """
    new, removed = rewrite_messages(body, images, REFUSED_FIELDS, _rewrite_part, model=model, cache_salt=cache_salt)
    return Rewritten(new, tuple(removed))


def _rewrite_part(part: dict[str, Any], image: ImageRewrite | None, removed: Removed) -> dict[str, Any]:
    part = without(part, REFUSED_PART_FIELDS, "", removed)
    holders = [name for name in ("image_url", "video_url", "audio_url") if isinstance(part.get(name), dict)]
    part = part | {name: without(part[name], REFUSED_PART_FIELDS, f"{name}.", removed) for name in holders}
    if image is None:
        return part
    old = part.get("image_url")
    fields = old if isinstance(old, dict) else {}
    return {**part, "type": "image_url", "image_url": {**fields, "url": image.url}}


_VALIDATION = re.compile(r"'loc': \('body', '([A-Za-z_]\w*)'")
_ABOUT_MESSAGES = re.compile(
    r"content hash mismatch"
    r"|Could not decode (?:image|audio|video)"
    r"|Error while loading data"
    r"|is longer than the model's context length"
    r"|exceeds the model's (?:maximum )?context length"
    r"|(?:Image|Video|Audio) count \d+ exceeds limit",
    re.IGNORECASE,
)


def prompt_error_field(status: int, body: Mapping[str, Any]) -> str | None:
    """Return the request field that an SGLang error answer is about, ``None`` if unknown.

    ``status`` is the HTTP status, ``body`` the decoded answer: ``{"object": "error", "message", "type", "param"}``
    from the chat endpoint, ``{"error": {...}}`` from the native one. ``param`` is nearly always null, so the engine's
    sentences are recognized (recorded answers of 0.5.23, and its sources).
    """
    if status < 400:
        return None
    error = error_of(body)
    message, param = error.get("message"), error.get("param")
    if isinstance(param, str) and param:
        return param
    if not isinstance(message, str):
        return None
    if _ABOUT_MESSAGES.search(message):
        return "messages"
    named = _VALIDATION.search(message)
    return named[1] if named else None
