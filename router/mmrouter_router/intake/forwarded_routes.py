"""Parsers for the routes whose requests engines get as they are.

``POST /v1/responses`` is predicted where it is modelled (:mod:`.forwarded_responses`), else placed by affinity. The
passed routes (:mod:`mmrouter_lib.engines.base.passed_routes`) go to the least loaded engine that serves them.

Media anywhere in the input (``input_image`` parts, screenshots in tool outputs) is fetched as for a chat and put into
the body. References that the engine would have to resolve (``file_url``, ``file_id``) and embeddings are refused.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from blake3 import blake3

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.nested_field_names import PASSED_NESTED
from mmrouter_lib.engines.base.passed_routes import PASSED_ROUTES, TRANSCRIBE
from mmrouter_lib.engines.base.request_fields import RESPONSES, words
from mmrouter_lib.media_identity import Modality
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import json_body
from mmrouter_router.intake.chat import check_variables
from mmrouter_router.intake.field_check import Reason, check_fields, check_nested
from mmrouter_router.intake.form_body import read_form, write_form
from mmrouter_router.intake.json_body import Object, Raw, Served
from mmrouter_router.intake.request import HEAD_CHARACTERS, ChatRequest, Limits, MediaPart

_INPUT, _TOOLS = "input", "tools"
_PROMPTS = (_INPUT, "previous_input_messages")  # fields that hold messages
_MEDIA: dict[str, Modality] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
_PLAIN_MEDIA: dict[str, Modality] = {
    f"{name}{end}": name for name in ("image", "video", "audio") for end in ("", "_data")
}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_IDENTITIES = ("uuid", "content_hash")
"""Fields of a part, or in its medium, that would be the engine's cache key (docs/engine-facts/vllm.md#image-uuid)."""
_FILE_REFERENCES = frozenset({"file_url", "file_id"})
STORED_FIELDS = frozenset({"background"})
"""Fields of responses that engines refuse unless they store them."""
NO_EMBEDDINGS = "send media, not embeddings"
_EMBEDDINGS = frozenset({"image_embeds", "video_embeds", "audio_embeds", "prompt_embeds", "image_pil"})
_BESIDE_MEDIA = words("type detail cache_control prompt_cache_breakpoint").union(
    _MEDIA, _IDENTITIES, _FILE_REFERENCES, _EMBEDDINGS
)


def parse_forwarded(
    raw: Raw,
    limits: Limits,
    served: Served,
    engine: EngineType = "vllm",
    reason: Reason = Reason(_INPUT, "not_modelled"),  # noqa: B008 - immutable
    *,
    stored: bool = False,
) -> ChatRequest:
    """Parse and check the body of a forwarded route. ``stored``: engines store responses, unless the client does not
    want it. Raises :class:`RequestError` only.
    """
    body = json_body.parse_object(raw, limits.max_request_bytes)
    model = json_body.model_of(body, served)
    check_fields(body, RESPONSES, engine, STORED_FIELDS if stored else ())
    check_variables(body)
    if body.get(_INPUT) is None:
        raise RequestError.missing(_INPUT)
    media: list[MediaPart] = []
    removed: set[str] = set()
    for name in _PROMPTS:
        for part in _media_in(body.get(name), name, removed):
            media.append(part)
            json_body.count_media(len(media), limits.max_images, part.param)
    return ChatRequest(
        model=model,
        messages=[{"role": "user", "content": _head(body, media)}],
        media=tuple(media),
        stream=json_body.flag(body, "stream", nullable=True),
        max_tokens=json_body.max_tokens(body, "max_output_tokens"),
        body=body,
        inexact=(reason,),
        removed=tuple(sorted(removed)),
        source=raw,
        endpoint=RESPONSES,
        stored=stored and body.get("store") is not False,
    )


def parse_passed(path: str, raw: Raw, limits: Limits, served_model: str, engine: EngineType = "vllm") -> ChatRequest:
    """Parse and check the body of a passed route. Raises :class:`RequestError` only.

    Media anywhere in the body are fetched by the router, also those that SGLang takes without ``data:``.
    """
    if path == TRANSCRIBE:
        return _parse_form(path, raw, limits, served_model)
    body = json_body.parse_object(raw, limits.max_request_bytes)
    fields = PASSED_ROUTES[path]
    steering = [name for name in adapter(engine).removed_fields if name in body and name not in fields]
    for name in steering:
        del body[name]
    unknown = next((name for name in body if name not in fields), None)
    if unknown is not None:
        raise RequestError.unknown_field(unknown)
    check_nested(body, PASSED_NESTED)
    if "model" in body:
        json_body.model_of(body, served_model)
    if (json_body.optional(body, "sampling_params", dict) or {}).get("custom_params") is not None:
        raise json_body.unsupported("sampling_params.custom_params", "it carries arguments for code in the engine")
    removed = set(steering)
    media: list[MediaPart] = []
    tools = {_TOOLS: body.pop(_TOOLS)} if _TOOLS in body else {}  # they only describe fields, which media may be
    for part in (*_plain_media_in(body, ""), *_media_in(body, "", removed)):
        media.append(part)
        json_body.count_media(len(media), limits.max_images, part.param)
    body |= tools
    stream = json_body.flag(body, "stream", nullable=True)
    made = _passed(path, raw, served_model, body, stream=stream)
    return replace(made, media=tuple(media), removed=tuple(sorted(removed)))


def _parse_form(path: str, raw: Raw, limits: Limits, served_model: str) -> ChatRequest:
    if len(raw) > limits.max_request_bytes:
        raise RequestError.too_large(limits.max_request_bytes)
    fields = read_form(raw)
    for field in fields:
        if field.name not in PASSED_ROUTES[path]:
            raise RequestError.unknown_field(field.name)
        if field.name == "model" and field.value != served_model.encode():
            raise RequestError.unknown_model(bytes(field.value).decode("utf-8", "replace"))
        if (field.filename is not None) != (field.name == "file"):
            raise RequestError.wrong_type(field.name, "a file" if field.name == "file" else "a text", field.name)
    if not any(field.name == "file" for field in fields):
        raise RequestError.missing("file")
    stream = any(field.name == "stream" and bytes(field.value).lower() in (b"true", b"1") for field in fields)
    return replace(_passed(path, raw, served_model, {}, stream=stream), form=write_form(fields))


def _passed(path: str, raw: Raw, served_model: str, body: Object, *, stream: bool) -> ChatRequest:
    return ChatRequest(
        model=served_model,
        messages=[],
        media=(),
        stream=stream,
        max_tokens=None,
        body=body,
        inexact=(Reason("body", "not_modelled"),),
        source=raw,
        endpoint=path,
    )


def _plain_media_in(value: Any, path: str) -> Iterator[MediaPart]:
    """Yield the media below a value that stand as a string, or in an array of strings, under one of SGLang's names."""
    for name, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        place = f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}" if path else name
        kind = _PLAIN_MEDIA.get(name) if isinstance(name, str) else None
        if kind is not None and item is not None:
            yield from _plain_media(value, name, item, place, kind)
        elif isinstance(item, dict | list):
            yield from _plain_media_in(item, place)


def _plain_media(holder: Any, key: str | int, value: Any, place: str, kind: Modality) -> Iterator[MediaPart]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _plain_media(value, number, item, f"{place}[{number}]", kind)
    elif isinstance(value, str):
        # Anything else than a URL would be a path of the engine's file system, or base64.
        url = value if _URL.match(value) else f"data:;base64,{value}"
        holder[key] = ""
        yield MediaPart(holder, key, url, place, kind)
    elif value is not None:
        raise json_body.unsupported(place, NO_EMBEDDINGS)


def _media_in(value: Any, path: str, removed: set[str]) -> Iterator[MediaPart]:
    """Yield every media URL below a value and clear its field. ``parse_object`` has bounded the depth."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, dict | list):
                yield from _media_in(item, f"{path}[{number}]", removed)
    elif isinstance(value, dict):
        # Of every part, also of one without a URL: its identity alone would name what the engine has cached.
        removed.update(field for field in _IDENTITIES if value.pop(field, None) is not None)
        if value.get("type") == "prompt_embeds":  # they stand under ``data``
            raise json_body.unsupported(f"{path}.type" if path else "type", NO_EMBEDDINGS)
        for name, item in list(value.items()):
            place = f"{path}.{name}" if path else name
            if item is None:
                continue
            if name in _EMBEDDINGS:
                raise json_body.unsupported(place, NO_EMBEDDINGS)
            if name in _FILE_REFERENCES:
                raise json_body.unsupported(place, "engines fetch and keep nothing; put the media into the request")
            if name in _MEDIA:
                json_body.known_keys(value, _BESIDE_MEDIA, path)
                holder, key, url, param = json_body.media_url(value, name, place)
                holder[key] = ""
                yield MediaPart(holder, key, url, param, _MEDIA[name])
                if holder is not value:
                    yield from _media_in(holder, place, removed)
            elif isinstance(item, dict | list):
                yield from _media_in(item, place, removed)


def _head(body: Object, media: list[MediaPart]) -> str:
    """Return a text that is stable as a conversation grows: the client's cache key, or the prompt's beginning."""
    own = json_body.optional(body, "prompt_cache_key", str)
    if own:
        return own[:HEAD_CHARACTERS]
    value = body[_INPUT]
    if not isinstance(value, str) and not (isinstance(value, list) and value):
        raise RequestError.wrong_type(_INPUT, "a string or a non-empty array", value)
    start = value if isinstance(value, str) else value[0]
    if isinstance(start, str | list):
        start = start[:HEAD_CHARACTERS]
    first = blake3(media[0].url.encode()).hexdigest() if media and media[0].param.startswith(f"{_INPUT}[0]") else ""
    instructions = json_body.optional(body, "instructions", str) or ""
    return f"{instructions[:HEAD_CHARACTERS]}\0{str(start)[:HEAD_CHARACTERS]}\0{first}"
