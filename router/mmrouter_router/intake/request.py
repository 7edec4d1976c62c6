"""What intake makes of a body, and the limits that it holds it to."""

from dataclasses import dataclass
from typing import Any, Literal, Self

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_lib.api import quantity_bytes
from mmrouter_router.intake.body import Raw
from mmrouter_router.intake.fields import Reason
from mmrouter_router.intake.splice import Inline

Modality = Literal["image", "video", "audio"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may hold at most: bytes of the body; images and other media, counted together."""

    max_request_bytes: int = 64 * 1024**2
    max_images: int = 32

    @classmethod
    def of(cls, media: MediaSettings) -> Self:
        """The limits of ``routing.media``."""
        return cls(quantity_bytes(media.max_request_bytes), media.max_images)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image: ``messages[message].content[part]``, its URL as the client wrote it, and the field of the URL."""

    message: int
    part: int
    url: str
    param: str
    taken: Inline | None = None
    """Its bytes, where they stood in the body and were taken out of it; then its URL is a word that stands for them."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """Media that the prompt does not model: video, audio, anything in a forwarded request.

    ``holder[key]`` is the place of its URL in the body. It is empty until :meth:`inline` puts the bytes there, so that
    no engine ever sees a client's URL, not even by a mistake of ours.
    """

    holder: dict[str, Any]
    key: str
    url: str
    param: str
    kind: Modality

    def inline(self, data_uri: str) -> None:
        """Put the resolved bytes into the body."""
        self.holder[self.key] = data_uri


@dataclass(slots=True)  # not frozen: there is one per request, and freezing it costs ten times what making it does
class ChatRequest:
    """A checked request, which nobody changes. ``body`` is the parsed object, normalised; ``inexact`` is empty where
    the prompt is modelled.

    ``removed`` names what intake took out because clients may not set it. A forwarded request (completions, responses)
    has no ``images`` and always a reason; its ``messages`` hold the beginning of its prompt as one user message, for
    affinity only.
    """

    model: str
    messages: list[dict[str, Any]]
    images: tuple[ImagePart, ...]
    media: tuple[MediaPart, ...]
    stream: bool
    max_tokens: int | None
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    chat_template_kwargs: dict[str, Any] | None
    body: dict[str, Any]
    inexact: tuple[Reason, ...]
    removed: tuple[str, ...] = ()
    source: Raw = b""
    """The body as it was parsed: as it came, or with words in the places of large images."""
