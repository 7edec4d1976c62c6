"""Chat requests to SGLang: what the router sets, what a client may not set, and what an answer's error is about."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mmrouter_lib.engines.vllm.request import ImageRewrite, Rewritten

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
    "rid",  # chosen by a client it may be another tenant's
    "session_id",
    "session_params",
    "lora_path",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
)
"""Body fields that steer caches, transfers or other people's requests; the router alone may set them."""

REFUSED_PART_FIELDS: Final = ("content_hash", "uuid")
"""Fields of a content part, and of its ``image_url``, that name the content instead of being it."""

REFUSED_HEADER_PREFIX: Final = "x-override-"
"""Headers by which this engine overrides fields of the body; none of a client's reaches it."""

REQUEST_ID_HEADER: Final = "x-override-rid"


def rewrite_chat(
    body: Mapping[str, Any], images: Sequence[ImageRewrite], *, model: str, cache_salt: str | None
) -> Rewritten:
    """Return the body that the engine gets; ``body`` stays as it is, and what does not change is shared with it.

    Images become ``data:`` URIs of the bytes that were hashed. The engine has no field for an identity on this
    endpoint, so ``ImageRewrite.uuid`` is not sent. Raises ``ValueError`` when an image names a part that is not there.
    """
    removed: dict[str, None] = {}
    new = dict(body)
    for name in REFUSED_FIELDS:
        if new.pop(name, None) is not None:
            removed[name] = None
    new["model"] = model
    if cache_salt is not None:
        new["cache_salt"] = cache_salt
    by_place = {(image.message, image.part): image for image in images}
    messages = new.get("messages")
    if isinstance(messages, list):
        new["messages"] = [_message(number, message, by_place, removed) for number, message in enumerate(messages)]
    if by_place:
        message, part = next(iter(by_place))
        raise ValueError(f"messages[{message}].content[{part}] does not exist")
    return Rewritten(new, tuple(removed))


def _message(number: int, message: Any, images: dict[tuple[int, int], ImageRewrite], removed: dict[str, None]) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts = [_part(part, images.pop((number, place), None), removed) for place, part in enumerate(content)]
    return {**message, "content": parts}


def _part(part: Any, image: ImageRewrite | None, removed: dict[str, None]) -> Any:
    if not isinstance(part, dict):
        if image is not None:
            raise ValueError(f"messages[{image.message}].content[{image.part}] is not an object")
        return part
    part = _strip(part, "", removed)
    holders = [name for name in ("image_url", "video_url", "audio_url") if isinstance(part.get(name), dict)]
    part = part | {name: _strip(part[name], f"{name}.", removed) for name in holders}
    if image is None:
        return part
    old = part.get("image_url")
    kept = old if isinstance(old, dict) else {}
    return {**part, "type": "image_url", "image_url": {**kept, "url": image.url}}


def _strip(value: dict[str, Any], prefix: str, removed: dict[str, None]) -> dict[str, Any]:
    found = [name for name in REFUSED_PART_FIELDS if name in value]
    if not found:
        return value
    removed.update((prefix + name, None) for name in found)
    return {name: item for name, item in value.items() if name not in found}


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
    """Return the request field that an SGLang error answer is about, ``None`` where that is not known.

    ``status`` is the HTTP status, ``body`` the decoded answer: ``{"object": "error", "message", "type", "param"}``
    from the chat endpoint, ``{"error": {...}}`` from the native one. ``param`` is nearly always null, so the engine's
    own sentences are recognised (captures of 0.5.23 and its sources).
    """
    if status < 400:
        return None
    error = body.get("error")
    error = error if isinstance(error, Mapping) else body
    message, param = error.get("message"), error.get("param")
    if isinstance(param, str) and param:
        return param
    if not isinstance(message, str):
        return None
    if _ABOUT_MESSAGES.search(message):
        return "messages"
    named = _VALIDATION.search(message)
    return named[1] if named else None
