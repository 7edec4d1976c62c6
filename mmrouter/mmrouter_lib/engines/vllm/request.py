"""Chat requests to vLLM: what the router sets, what a client may not set, and what an answer's error is about."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REFUSED_FIELDS = (
    "cache_salt",
    "mm_hashes",
    "content_hash",
    "extra_key",
    "kv_transfer_params",
    "ec_transfer_params",
    "request_id",  # chosen by a client it may be another tenant's
)
"""Body fields that steer caches, transfers or other people's requests; the router alone may set them."""

REFUSED_XARGS = ("kv_cache_report_mode", "kv_transfer_params", "ec_transfer_params")
"""Keys of ``vllm_xargs``. A report of reused blocks looks like new copies of them.

See docs/engine-facts/vllm.md#what-publishes-no-events.
"""


@dataclass(frozen=True, slots=True)
class ImageRewrite:
    """What one image part becomes: ``messages[message].content[part]``, bytes as a ``data:`` URI, identity as text."""

    message: int
    part: int
    url: str
    uuid: str


@dataclass(slots=True)
class Rewritten:
    """The body for the engine and the names of what a client had set and may not (a bounded set, fit for a label)."""

    body: dict[str, Any]
    removed: tuple[str, ...]


def rewrite_chat(
    body: Mapping[str, Any], images: Sequence[ImageRewrite], *, model: str, cache_salt: str | None
) -> Rewritten:
    """Return the body that the engine gets; ``body`` stays as it is, and what does not change is shared with it.

    ``uuid`` stands beside ``image_url``; inside that object vLLM ignores it (docs/engine-facts/vllm.md#image-uuid).
    Raises ``ValueError``
    when an image names a part that does not exist.
    """
    removed: dict[str, None] = {}
    new = dict(body)
    for name in REFUSED_FIELDS:
        if new.pop(name, None) is not None:
            removed[name] = None
    _strip_xargs(new, removed)
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


def _strip_xargs(body: dict[str, Any], removed: dict[str, None]) -> None:
    xargs = body.get("vllm_xargs")
    if not isinstance(xargs, dict) or not any(name in xargs for name in REFUSED_XARGS):
        return
    removed.update((f"vllm_xargs.{name}", None) for name in REFUSED_XARGS if name in xargs)
    body["vllm_xargs"] = {name: value for name, value in xargs.items() if name not in REFUSED_XARGS}


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
    if "uuid" in part:
        removed["uuid"] = None
        part = {name: value for name, value in part.items() if name != "uuid"}
    if image is None:
        return part
    old = part.get("image_url")
    kept = {name: value for name, value in old.items() if name != "uuid"} if isinstance(old, dict) else {}
    if isinstance(old, dict) and "uuid" in old:
        removed["image_url.uuid"] = None
    return {**part, "type": "image_url", "image_url": {**kept, "url": image.url}, "uuid": image.uuid}


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
"""Parameters that vLLM names after its own arguments, and what a client calls them."""


def prompt_error_field(status: int, body: Mapping[str, Any]) -> str | None:
    """Return the request field that a vLLM error answer is about, ``None`` where that is not known.

    ``status`` is the HTTP status, ``body`` the decoded answer. vLLM leaves ``param`` null for most faults of images and
    prompts, so the sentences that it uses for them are recognised (captures of 0.32;
    docs/engine-facts/vllm.md#requests-that-end-the-engine).
    """
    if status < 400:
        return None
    error = body.get("error")
    error = error if isinstance(error, Mapping) else body
    message, param = error.get("message"), error.get("param")
    if not isinstance(param, str) or not param:
        found = _PARAMETER.search(message) if isinstance(message, str) else None
        param = found[1] if found else None
    if param is not None:
        param = param.removeprefix("body.")
        return _PARAM_NAMES.get(param, param)
    if isinstance(message, str) and _ABOUT_MESSAGES.search(message):
        return "messages"
    return None
