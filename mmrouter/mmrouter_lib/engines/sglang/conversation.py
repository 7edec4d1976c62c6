"""The text that SGLang 0.5.23 makes of PaddleOCR-VL's chats, by a form of its own in place of the model's template.

Compared with the engine's own code by ``tests/conformance/sglang/test_rendering.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mmrouter_lib.prompt.templates import TemplateError

_BEGIN, _END = "<|begin_of_sentence|>", "<|end_of_sentence|>"
_MEDIA = {
    "image_url": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>\n",
    "video_url": "<video>",
    "audio_url": "<audio>",
}
_FEW_IMAGES = 16  # in a message with more of them, every text begins on a new line


def conversation(body: Mapping[str, Any]) -> str:
    """Return the prompt text of a chat request's body.

    The last system message stands first. A final assistant message goes on only with ``continue_final_message``.
    Raises :class:`TemplateError` for messages that the engine refuses.
    """
    messages = body.get("messages")
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise TemplateError("messages must be a list of at least one message")
    system, turns, role = "", list[str](), None
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        role, content = (message.get(key) if isinstance(message, Mapping) else None for key in ("role", "content"))
        match role:
            case "system":
                system = _single_text(content, where)
            case "user":
                turns.append(_user_turn(content, where))
            case "assistant":
                text = "" if content is None else _single_text(content, where)
                turns.append("Assistant: " + (text + _END) * bool(text))
            case _:
                raise TemplateError(f"{where}.role {role!r} is not supported for this model")
    goes_on = bool(body.get("continue_final_message")) and role == "assistant"
    text = "".join((_BEGIN, system, *turns, *([] if goes_on else ["Assistant: "])))
    # The engine cuts the end twice: as a stop, then as a separator.
    return text.removesuffix(_END).removesuffix(_END) if goes_on else text


def _single_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and len(content) == 1 and content[0].get("type") == "text":
        return str(content[0]["text"])
    raise TemplateError(f"{where}.content must be a single text")


def _user_turn(content: Any, where: str) -> str:
    if not isinstance(content, str):
        if not isinstance(content, Sequence):
            raise TemplateError(f"{where}.content must be a text or a list of parts")
        kinds = [part.get("type") for part in content]
        if unknown := [kind for kind in kinds if kind not in ("text", *_MEDIA)]:
            raise TemplateError(f"{where}.content has a part of the type {unknown[0]!r}, which is not supported")
        before = "\n" * (kinds.count("image_url") > _FEW_IMAGES)
        parts = zip(kinds, content, strict=True)
        content = "".join(before + part["text"] if kind == "text" else _MEDIA[kind] for kind, part in parts)
    image, text = _MEDIA["image_url"], str(content)
    return "User: " + (text.replace(image, image.rstrip()) + "\n") * bool(text)
