"""The text that SGLang 0.5.23 makes of chats by a form of its own, in place of the model's template.

Compared with the engine's own code by ``tests/conformance/sglang/test_rendering.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mmrouter_lib.prompt.templates import TemplateError

_FEW_IMAGES = 16  # in a message with more of them, every text begins on a new line
_MEDIA = {"image_url": "", "video_url": "<video>", "audio_url": "<audio>"}


@dataclass(frozen=True, slots=True)
class ConversationForm:
    """The texts of a form. ``begin`` and ``system_end`` stand around the last system message, else ``system``.

    Every turn is ``user`` or ``assistant``, its text and the end of its role, or the first alone where there is no
    text. ``image`` stands for an image, and a newline follows it in a list of parts: where the part is, or with
    ``images_first`` before everything else. ``joins_images`` takes that newline away again. ``stops``: ends of which
    each is cut off a message that goes on, in this order.
    """

    begin: str
    system: str
    system_end: str
    user: str
    user_end: str
    assistant: str
    assistant_end: str
    image: str
    stops: tuple[str, ...]
    images_first: bool = False
    joins_images: bool = False

    def text(self, body: Mapping[str, Any]) -> str:
        """Return the prompt text of a chat request's body.

        A final assistant message goes on only with ``continue_final_message``. Raises :class:`TemplateError` for
        messages that the engine refuses.
        """
        messages = body.get("messages")
        if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
            raise TemplateError("messages must be a list of at least one message")
        system, turns, role = self.system, list[str](), None
        for at, message in enumerate(messages):
            role, content = (message.get(key) if isinstance(message, Mapping) else None for key in ("role", "content"))
            match role:
                case "system":
                    system = _single_text(content, at)
                case "user":
                    text = content if isinstance(content, str) else self._joined(content, at)
                    if self.joins_images:
                        text = text.replace(f"{self.image}\n", self.image)
                    turns.append(self.user + (text + self.user_end if text else ""))
                case "assistant":
                    text = "" if content is None else _single_text(content, at)
                    turns.append(self.assistant + (text + self.assistant_end if text else ""))
                case _:
                    raise TemplateError(f"messages[{at}].role {role!r} is not supported for this model")
        begun = "".join((self.begin, system, self.system_end, *turns))
        if not (body.get("continue_final_message") and role == "assistant"):
            return begun + self.assistant
        for stop in self.stops:
            begun = begun.removesuffix(stop)
        return begun

    def _joined(self, content: Any, at: int) -> str:
        parts = _parts(content, at)
        many, made = sum(kind == "image_url" for kind, _ in parts) > _FEW_IMAGES, ""
        for kind, text in parts:
            if kind == "image_url":
                shown = f"{self.image}\n"
                made = shown + made if self.images_first else made + shown
            else:
                made += f"\n{text}" if many and kind == "text" else text
        return made


_END: Final = "<|end_of_sentence|>"
PADDLEOCR: Final = ConversationForm(
    begin="<|begin_of_sentence|>",
    system="",
    system_end="",
    stops=(_END, _END),
    user="User: ",
    user_end="\n",
    assistant="Assistant: ",
    assistant_end=_END,
    image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    joins_images=True,
)
_IM_END: Final = "<|im_end|>\n"
_COMMA: Final = "\N{FULLWIDTH COMMA}"
INTERNVL: Final = ConversationForm(
    begin="<|im_start|>system\n",
    system=_COMMA.join(
        (
            "你是书生·万象",
            "英文名是InternVL",
            "是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。",
        )
    ),
    system_end=_IM_END,
    stops=("<|im_end|>", "<|action_end|>", _IM_END),
    user="<|im_start|>user\n",
    user_end=_IM_END,
    assistant="<|im_start|>assistant\n",
    assistant_end=_IM_END,
    image="<IMG_CONTEXT>",
    images_first=True,
)


def _single_text(content: Any, at: int) -> str:
    if isinstance(content, str):
        return content
    parts = _parts(content, at)
    if [kind for kind, _ in parts] != ["text"]:
        raise TemplateError(f"messages[{at}].content must be a single text")
    return parts[0][1]


def _parts(content: Any, at: int) -> list[tuple[str, str]]:
    """Return the type and the text of each part; an image has none."""
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
