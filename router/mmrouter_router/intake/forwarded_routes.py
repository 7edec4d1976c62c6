"""Parser for the forwarded routes ``POST /v1/completions`` and ``/v1/responses``, which are placed by affinity.

Media may occur anywhere in a prompt of ``/v1/responses`` (``input_image`` parts, screenshots in tool outputs). The
router fetches all of it as for a chat and puts the bytes into the body. References that the engine would have to
resolve (``file_url``, ``file_id``) and embeddings are refused.
"""

from collections.abc import Iterator
from typing import Any

from blake3 import blake3

from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake.json_body import Raw, parse_object
from mmrouter_router.intake.json_fields import (
    Object,
    count_media,
    flag,
    max_tokens,
    media_url,
    model_of,
    text,
    unsupported,
)
from mmrouter_router.intake.prompt_fields import Reason
from mmrouter_router.intake.request import ChatRequest, Limits, MediaPart, Modality

HEAD_CHARACTERS = 2048
"""Characters of a prompt's JSON form that identify its beginning."""

_PROMPTS = ("input", "prompt", "previous_input_messages", "messages")
"""Top-level fields that engines read messages or prompts from."""
_MEDIA: dict[str, Modality] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
_FILE_REFERENCES = frozenset({"file_url", "file_id"})
_EMBEDDINGS = frozenset({"image_embeds", "video_embeds", "audio_embeds", "prompt_embeds", "image_pil"})


def parse_forwarded(raw: Raw, limits: Limits, served_model: str) -> ChatRequest:
    """Parse and check the body of a forwarded route. Raises :class:`RequestError` only."""
    body = parse_object(raw, limits.max_request_bytes)
    model = model_of(body, served_model)
    if body.get("prompt_embeds") is not None:
        raise _embeddings("prompt_embeds")
    prompt = next((name for name in ("input", "prompt") if body.get(name) is not None), None)
    if prompt is None:
        raise RequestError.missing("input" if "input" in body else "prompt")
    media: list[MediaPart] = []
    removed: set[str] = set()
    for name in _PROMPTS:
        for part in _media_in(body.get(name), name, removed):
            media.append(part)
            count_media(len(media), limits.max_images, part.param)
    return ChatRequest(
        model=model,
        messages=[{"role": "user", "content": _head(body, prompt, media)}],
        images=(),
        media=tuple(media),
        stream=flag(body, "stream", nullable=True),
        max_tokens=max_tokens(body, "max_output_tokens", "max_tokens"),
        tools=None,
        documents=None,
        add_generation_prompt=False,
        continue_final_message=False,
        add_special_tokens=False,
        chat_template_kwargs=None,
        body=body,
        inexact=(Reason(prompt, "not_modelled"),),
        removed=tuple(sorted(removed)),
        source=raw,
    )


def _media_in(value: Any, path: str, removed: set[str]) -> Iterator[MediaPart]:
    """Yield every media URL below a value and clear its field. ``parse_object`` has bounded the depth."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, dict | list):
                yield from _media_in(item, f"{path}[{number}]", removed)
    elif isinstance(value, dict):
        for name, item in list(value.items()):
            place = f"{path}.{name}"
            if item is None:
                continue
            if name in _EMBEDDINGS:
                raise _embeddings(place)
            if name in _FILE_REFERENCES:
                raise unsupported(place, "engines fetch and keep nothing; put the media into the request")
            if name in _MEDIA:
                yield _take_url(value, name, place, removed)
            elif isinstance(item, dict | list):
                yield from _media_in(item, place, removed)


def _take_url(part: Object, name: str, path: str, removed: set[str]) -> MediaPart:
    # A client's uuid would be the engine's cache key (docs/engine-facts/vllm.md#image-uuid).
    if part.pop("uuid", None) is not None:
        removed.add("uuid")
    holder, key, url, param = media_url(part, name, path)
    holder[key] = ""
    return MediaPart(holder, key, url, param, _MEDIA[name])


def _head(body: Object, prompt: str, media: list[MediaPart]) -> str:
    """Return a text that is stable as a conversation grows: the client's cache key, or the prompt's beginning."""
    own = text(body, "prompt_cache_key")
    if own:
        return own[:HEAD_CHARACTERS]
    value = body[prompt]
    if not isinstance(value, str) and not (isinstance(value, list) and value):
        raise RequestError.wrong_type(prompt, "a string or a non-empty array", value)
    start = value if isinstance(value, str) or isinstance(value[0], int) else value[0]
    if isinstance(start, str | list):
        start = start[:HEAD_CHARACTERS]
    first = blake3(media[0].url.encode()).hexdigest() if media and media[0].param.startswith(f"{prompt}[0]") else ""
    instructions = text(body, "instructions") or ""
    return f"{instructions[:HEAD_CHARACTERS]}\0{str(start)[:HEAD_CHARACTERS]}\0{first}"


def _embeddings(path: str) -> RequestError:
    return unsupported(path, "send media, not embeddings")
