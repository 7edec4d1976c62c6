"""The text that SGLang 0.5.23 makes of PaddleOCR-VL's chats, by a form of its own in place of the model's template.

Compared with the engine's own code by ``tests/conformance/sglang/test_rendering.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mmrouter_lib.prompt.templates import TemplateError

_BEGIN, _END = "<|begin_of_sentence|>", "<|end_of_sentence|>"
_IMAGE = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
_MEDIA = {"image_url": f"{_IMAGE}\n", "video_url": "<video>", "audio_url": "<audio>"}
_FEW_IMAGES = 16  # in a message with more of them, every text begins on a new line


def paddleocr_text(body: Mapping[str, Any]) -> str:
    """Return the prompt text of a chat request's body.

    The last system message stands first. A final assistant message goes on only with ``continue_final_message``.
    Raises :class:`TemplateError` for messages that the engine refuses.
    """
    messages = body.get("messages")
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise TemplateError("messages must be a list of at least one message")
    system, turns, role = "", list[str](), None
    for at, message in enumerate(messages):
        role, content = (message.get(key) if isinstance(message, Mapping) else None for key in ("role", "content"))
        match role:
            case "system":
                system = _single_text(content, at)
            case "user":
                text = content if isinstance(content, str) else _joined(content, at)
                turns.append("User: " + (text.replace(_MEDIA["image_url"], _IMAGE) + "\n" if text else ""))
            case "assistant":
                text = "" if content is None else _single_text(content, at)
                turns.append("Assistant: " + (text + _END if text else ""))
            case _:
                raise TemplateError(f"messages[{at}].role {role!r} is not supported for this model")
    begun = "".join((_BEGIN, system, *turns))
    if body.get("continue_final_message") and role == "assistant":
        # The engine cuts the end twice: as a stop, then as a separator.
        return begun.removesuffix(_END).removesuffix(_END)
    return begun + "Assistant: "


def _single_text(content: Any, at: int) -> str:
    if isinstance(content, str):
        return content
    parts = _parts(content, at)
    if [kind for kind, _ in parts] != ["text"]:
        raise TemplateError(f"messages[{at}].content must be a single text")
    return parts[0][1]


def _joined(content: Any, at: int) -> str:
    parts = _parts(content, at)
    many = sum(kind == "image_url" for kind, _ in parts) > _FEW_IMAGES
    return "".join(f"\n{text}" if many and kind == "text" else text for kind, text in parts)


def _parts(content: Any, at: int) -> list[tuple[str, str]]:
    """Return the type and the text of each part."""
    if not isinstance(content, Sequence):
        raise TemplateError(f"messages[{at}].content must be a text or a list of parts")
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else _MEDIA.get(str(kind))
        if not isinstance(text, str):
            raise TemplateError(f"messages[{at}].content[{number}] is no text and no medium that is supported")
        parts.append((str(kind), text))
    return parts
