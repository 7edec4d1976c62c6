"""Parser for the body of ``POST /v1/chat/completions``: its fields, messages and content parts.

Parts are allow-listed by type *and* by key: engines infer a missing type from keys, and templates read keys, so a text
part with an image key would be a text to the router and an image to the engine.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.request_fields import CHAT, words
from mmrouter_lib.media_identity import Modality
from mmrouter_lib.prompt.prompter import REPLACING
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import json_body
from mmrouter_router.intake.field_check import check_fields, inexact_fields
from mmrouter_router.intake.json_body import MAX_DEPTH, Object, Raw, Served
from mmrouter_router.intake.request import MIN_URI, ChatRequest, ImagePart, Limits, MediaPart, extract_images


def parse_chat(raw: Raw, limits: Limits, served: Served, engine: EngineType = "vllm") -> ChatRequest:
    """Parse and check the body of a chat request for one engine type. Raises :class:`RequestError` only."""
    return parse_extracted(raw, limits, lambda body: parse_unextracted(body, limits, served, engine))


def parse_extracted(raw: Raw, limits: Limits, parse: Callable[[Raw], ChatRequest]) -> ChatRequest:
    """Return what ``parse`` makes of a body, which gets it without its large images. Raises what ``parse`` raises."""
    if len(raw) > limits.max_request_bytes:
        raise RequestError.too_large(limits.max_request_bytes)
    if len(raw) > MIN_URI and (extracted := extract_images(raw)) is not None:
        # Where this fails the original body is parsed, whose error quotes the client.
        with suppress(RequestError):
            request = parse(extracted.raw)
            images = tuple(replace(image, inline=extracted.images.get(image.url)) for image in request.images)
            media = tuple(
                part._replace(inline=extracted.images.get(part.url)) if part.kind != "image" else part
                for part in request.media
            )
            taken = [image.url for image in images if image.inline is not None]
            taken += [part.url for part in media if part.inline is not None]
            if sorted(taken) == sorted(extracted.images):
                return replace(request, images=images, media=media)
    return parse(raw)


def parse_unextracted(raw: Raw, limits: Limits, served: Served, engine: EngineType) -> ChatRequest:
    body = json_body.parse_object(raw, limits.max_request_bytes)
    model = json_body.model_of(body, served)
    check_fields(body, CHAT, engine)
    messages = json_body.objects(body, "messages")
    if messages is None:
        raise RequestError.missing("messages")
    if not messages:
        raise RequestError.invalid("'messages' must hold at least one message.", param="messages", code="empty_array")
    parts = MessageParts(limits)
    for number, message in enumerate(messages):
        parts.read(number, message)
    add = json_body.flag(body, "add_generation_prompt", default=True)
    proceed = json_body.flag(body, "continue_final_message")
    if add and proceed and not adapter(engine).continues_with_generation_prompt:
        problem = "A final message is either continued or followed by a new one: set 'add_generation_prompt' to false."
        raise RequestError.invalid(problem, param="continue_final_message", code="invalid_value")
    check_variables(body)
    json_body.optional(body, "vllm_xargs", dict)
    json_body.optional(body, "reasoning_effort", str)
    json_body.objects(body, "documents")
    json_body.flag(body, "add_special_tokens")
    timed = {part.kind for part in parts.media}
    inexact = tuple(inexact_fields(body, CHAT, engine, timed=timed))
    check_tools(body)
    return ChatRequest(
        model=model,
        messages=messages,
        images=tuple(parts.images),
        media=tuple(parts.media),
        stream=json_body.flag(body, "stream", nullable=True),
        max_tokens=json_body.max_tokens(body, "max_completion_tokens", "max_tokens"),
        body=body,
        inexact=inexact,
        source=raw,
    )


ROLES = ("system", "developer", "user", "assistant", "tool")

TEXT_TYPES = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Part types that engines read as text -> the key of the text."""
IMAGE_TYPES = {"image_url": "image_url", "input_image": "image_url"}
MEDIA_TYPES: dict[str, Modality] = {"video_url": "video", "audio_url": "audio", "input_audio": "audio"}
PART_TYPES = (*TEXT_TYPES, *IMAGE_TYPES, *MEDIA_TYPES)

MEDIA_KEYS = words(
    "image image_url image_pil image_embeds input_image video video_url video_embeds audio audio_url audio_embeds",
    "input_audio prompt_embeds",
)
"""Keys that make an engine or a template read a part as media, whatever its type."""

_PART_HARMLESS = words("type uuid detail closed cache_control prompt_cache_breakpoint")  # no template reads them

_MESSAGE_TEXTS = words("name tool_call_id reasoning reasoning_content")
_MESSAGE_OTHERS = words("role content tool_calls") | words("refusal audio annotations function_call")
"""Fields checked elsewhere, and OpenAI's fields of an assistant message that the engine drops."""

_CALL_KEYS = words("id type function index")
_FUNCTION_KEYS = words("name arguments")
_AUDIO_KEYS = words("data format")


class MessageParts:
    """The media of one request's messages, in prompt order."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.images: list[ImagePart] = []
        self.media: list[MediaPart] = []

    def read(self, number: int, message: Object) -> None:
        """Check a message; make each part canonical, for the same prompt. Raises :class:`RequestError`."""
        # Field paths are formatted only for errors: a conversation has many messages.
        role = message.get("role")
        if role not in ROLES:
            json_body.required(message, "role", str, f"messages[{number}].role")
            raise RequestError.unknown_value(f"messages[{number}].role", role, ROLES)
        for name, value in message.items():
            if name in _MESSAGE_TEXTS:
                if value is not None and not isinstance(value, str):
                    raise RequestError.wrong_type(f"messages[{number}].{name}", "a string", value)
            elif name not in _MESSAGE_OTHERS:
                raise RequestError.unknown_field(f"messages[{number}].{name}")
        if message.get("tool_calls") is not None:
            _tool_calls(message, f"messages[{number}].tool_calls")
        content = message.get("content")
        if isinstance(content, list):
            for place, part in enumerate(content):
                if not _is_plain_text(part):
                    content[place] = self._part(number, place, part, f"messages[{number}].content[{place}]")
        elif content is None and role != "assistant":
            raise RequestError.missing(f"messages[{number}].content")
        elif content is not None and not isinstance(content, str):
            field, expected = f"messages[{number}].content", "a string or an array of content parts"
            raise RequestError.wrong_type(field, expected, content)

    def _part(self, message: int, place: int, part: Any, path: str) -> Object:
        if not isinstance(part, dict):
            raise RequestError.wrong_type(path, "an object", part)
        kind = json_body.required(part, "type", str, f"{path}.type")
        own = TEXT_TYPES.get(kind) or IMAGE_TYPES.get(kind) or kind
        if kind not in PART_TYPES:
            raise RequestError.unknown_part(f"{path}.type", kind, PART_TYPES)
        for name in part:
            if name in MEDIA_KEYS and name != own:
                message_text = f"A content part of type '{kind}' cannot hold '{name}' as well."
                raise RequestError.invalid(message_text, param=f"{path}.{name}", code="ambiguous_content_part")
            if name != own and name not in _PART_HARMLESS:
                raise RequestError.unknown_field(f"{path}.{name}")
        if kind in TEXT_TYPES:
            return _plain(part, own, "text", json_body.required(part, own, str, f"{path}.{own}"))
        if kind == "input_audio":
            url, param = _inline_audio(part, f"{path}.{own}")
        else:
            _, _, url, param = json_body.media_url(part, own, f"{path}.{own}")
        if kind in IMAGE_TYPES:
            self.images.append(ImagePart(message, place, url, param))
            plain = _plain(part, own, "image_url", {"url": url})
        else:
            holder: Object = {"url": ""}
            self.media.append(MediaPart(holder, "url", url, param, MEDIA_TYPES[kind], (message, place)))
            plain = _plain(part, own, f"{MEDIA_TYPES[kind]}_url", holder)
        json_body.count_media(len(self.images) + len(self.media), self._limits.max_images, param)
        return plain


def _is_plain_text(part: Any) -> bool:
    return type(part) is dict and len(part) == 2 and part.get("type") == "text" and type(part.get("text")) is str


def _plain(part: Object, own: str, kind: str, value: Any) -> Object:
    return {**{name: item for name, item in part.items() if name != own}, "type": kind, kind: value}


def _inline_audio(part: Object, path: str) -> tuple[str, str]:
    audio = json_body.required(part, "input_audio", dict, path)
    json_body.known_keys(audio, _AUDIO_KEYS, path)
    data = json_body.required(audio, "data", str, f"{path}.data")
    form = json_body.required(audio, "format", str, f"{path}.format")
    if not (form.isascii() and form.isalnum()):
        message = "An audio format is a word like 'wav'."
        raise RequestError.invalid(message, param=f"{path}.format", code="invalid_value")
    return f"data:audio/{form};base64,{data}", f"{path}.data"


def _tool_calls(message: Object, path: str) -> None:
    for number, call in enumerate(json_body.objects(message, "tool_calls", path) or ()):
        place = f"{path}[{number}].function"
        function = json_body.required(call, "function", dict, place)
        json_body.known_keys(call, _CALL_KEYS, f"{path}[{number}]")
        json_body.known_keys(function, _FUNCTION_KEYS, place)
        json_body.required(function, "name", str, f"{place}.name")
        if isinstance(function.get("arguments"), dict):
            continue
        place = f"{place}.arguments"
        check_arguments(json_body.optional(function, "arguments", str, place) or "", place)


def check_variables(body: Object) -> None:
    """Raise 400 for a template's variable that would replace what an engine passes to the template itself."""
    variables = json_body.optional(body, "chat_template_kwargs", dict) or {}
    for name in REPLACING if variables else ():
        if variables.get(name) not in (None, "auto"):
            place = f"chat_template_kwargs.{name}"
            raise RequestError.invalid(f"'{place}' is not accepted.", param=place, code="invalid_value")


def check_arguments(arguments: str, path: str) -> None:
    """Raise 400 for arguments of a tool call that the recursive parsers of engine and template could not read."""
    if arguments.count("[") + arguments.count("{") > MAX_DEPTH and json_body.text_depth(arguments) > MAX_DEPTH:
        message = f"The arguments are nested more than {MAX_DEPTH} levels deep."
        raise RequestError.invalid(message, param=path, code="invalid_value")


def check_tools(body: Object) -> None:
    tools = json_body.objects(body, "tools")
    if tools is not None and not tools:
        message = "'tools' must hold at least one tool, or be left out."
        raise RequestError.invalid(message, param="tools", code="empty_array")
    for number, tool in enumerate(tools or ()):
        kind = tool.get("type", "function")
        if kind != "function":
            raise RequestError.unknown_value(f"tools[{number}].type", kind, ("function",))
        place = f"tools[{number}].function"
        function = json_body.required(tool, "function", dict, place)
        json_body.required(function, "name", str, f"{place}.name")
        json_body.optional(function, "description", str, f"{place}.description")
        json_body.optional(function, "parameters", dict, f"{place}.parameters")
