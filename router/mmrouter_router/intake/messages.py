"""Validation of a chat request's messages and content parts.

Parts are allow-listed by type *and* by key: engines infer a missing type from keys, and templates read keys, so a text
part with an image key would be a text to the router and an image to the engine.
"""

from typing import Any

from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake.json_body import MAX_DEPTH, text_depth
from mmrouter_router.intake.json_fields import (
    Object,
    count_media,
    mapping,
    media_url,
    objects,
    required_mapping,
    required_text,
    text,
)
from mmrouter_router.intake.prompt_fields import Reason, words
from mmrouter_router.intake.request import ImagePart, Limits, MediaPart, Modality

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

_PART_HARMLESS = words("type uuid detail closed cache_control prompt_cache_breakpoint")
"""Other keys of a part, which no template reads; a uuid is removed and counted when the body is rewritten."""

_MESSAGE_TEXTS = words("name tool_call_id reasoning reasoning_content")
_MESSAGE_OTHERS = words("role content tool_calls") | words("refusal audio annotations function_call")
"""Fields checked elsewhere, and OpenAI's fields of an assistant message that the engine drops."""

MAX_REASONS = 32
"""Reasons kept per request, so that a client cannot choose how many."""


class MessageParts:
    """The media of one request's messages in prompt order, and reasons why the messages are not modelled."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.images: list[ImagePart] = []
        self.media: list[MediaPart] = []
        self.inexact: list[Reason] = []

    def read(self, messages: list[Object]) -> None:
        """Check all messages and replace each content part by its canonical form, which gives the same prompt.

        Raises :class:`RequestError` that names the first invalid field.
        """
        for number, message in enumerate(messages):
            self._message(number, message)

    def _message(self, number: int, message: Object) -> None:
        # Field paths are formatted only for errors: a conversation has many messages.
        role = message.get("role")
        if role not in ROLES:
            required_text(message, "role", f"messages[{number}].role")
            raise RequestError.unknown_value(f"messages[{number}].role", role, ROLES)
        for name, value in message.items():
            if name in _MESSAGE_TEXTS:
                if value is not None and not isinstance(value, str):
                    raise RequestError.wrong_type(f"messages[{number}].{name}", "a string", value)
            elif name not in _MESSAGE_OTHERS:
                self._unknown(f"messages[{number}].{name}")
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
            raise RequestError.wrong_type(
                f"messages[{number}].content", "a string or an array of content parts", content
            )

    def _part(self, message: int, place: int, part: Any, path: str) -> Object:
        if not isinstance(part, dict):
            raise RequestError.wrong_type(path, "an object", part)
        kind = required_text(part, "type", f"{path}.type")
        own = TEXT_TYPES.get(kind) or IMAGE_TYPES.get(kind) or kind
        if kind not in PART_TYPES:
            raise RequestError.unknown_part(f"{path}.type", kind, PART_TYPES)
        for name in part:
            if name in MEDIA_KEYS and name != own:
                message_text = f"A content part of type '{kind}' cannot hold '{name}' as well."
                raise RequestError.invalid(message_text, param=f"{path}.{name}", code="ambiguous_content_part")
            if name != own and name not in _PART_HARMLESS:
                self._unknown(f"{path}.{name}")
        if kind in TEXT_TYPES:
            return _plain(part, own, "text", required_text(part, own, f"{path}.{own}"))
        if kind == "input_audio":
            url, param = _inline_audio(part, f"{path}.{own}")
        else:
            _, _, url, param = media_url(part, own, f"{path}.{own}")
        if kind in IMAGE_TYPES:
            self.images.append(ImagePart(message, place, url, param))
            plain = _plain(part, own, "image_url", {"url": url})
        else:
            holder: Object = {"url": ""}
            self.media.append(MediaPart(holder, "url", url, param, MEDIA_TYPES[kind]))
            self.inexact.append(Reason(param, "media"))
            plain = _plain(part, own, f"{MEDIA_TYPES[kind]}_url", holder)
        count_media(len(self.images) + len(self.media), self._limits.max_images, param)
        return plain

    def _unknown(self, field: str) -> None:
        if len(self.inexact) < MAX_REASONS:
            self.inexact.append(Reason(field, "unknown_field"))


def _is_plain_text(part: Any) -> bool:
    """Return whether a part is a text without further keys, as nearly all are."""
    return type(part) is dict and len(part) == 2 and part.get("type") == "text" and type(part.get("text")) is str


def _plain(part: Object, own: str, kind: str, value: Any) -> Object:
    return {**{name: item for name, item in part.items() if name != own}, "type": kind, kind: value}


def _inline_audio(part: Object, path: str) -> tuple[str, str]:
    """Return OpenAI's inline audio (``{"data", "format"}``) as a ``data:`` URI, and its field."""
    audio = required_mapping(part, "input_audio", path)
    data, form = required_text(audio, "data", f"{path}.data"), required_text(audio, "format", f"{path}.format")
    if not (form.isascii() and form.isalnum()):
        raise RequestError.invalid(
            "An audio format is a word like 'wav'.", param=f"{path}.format", code="invalid_value"
        )
    return f"data:audio/{form};base64,{data}", f"{path}.data"


def _tool_calls(message: Object, path: str) -> None:
    for number, call in enumerate(objects(message, "tool_calls", path) or ()):
        place = f"{path}[{number}].function"
        function = required_mapping(call, "function", place)
        required_text(function, "name", f"{place}.name")
        if isinstance(function.get("arguments"), dict):
            continue
        arguments = text(function, "arguments", f"{place}.arguments") or ""
        # Engine and template parse this text with a recursive parser.
        if arguments.count("[") + arguments.count("{") > MAX_DEPTH and text_depth(arguments) > MAX_DEPTH:
            message_text = f"The arguments are nested more than {MAX_DEPTH} levels deep."
            raise RequestError.invalid(message_text, param=f"{place}.arguments", code="invalid_value")


def tools_of(body: Object) -> list[Object] | None:
    """Return the tools of a request; checks what a template reads of them."""
    tools = objects(body, "tools")
    if tools is not None and not tools:
        raise RequestError.invalid(
            "'tools' must hold at least one tool, or be left out.", param="tools", code="empty_array"
        )
    for number, tool in enumerate(tools or ()):
        kind = tool.get("type", "function")
        if kind != "function":
            raise RequestError.unknown_value(f"tools[{number}].type", kind, ("function",))
        place = f"tools[{number}].function"
        function = required_mapping(tool, "function", place)
        required_text(function, "name", f"{place}.name")
        text(function, "description", f"{place}.description")
        mapping(function, "parameters", f"{place}.parameters")
    return tools
