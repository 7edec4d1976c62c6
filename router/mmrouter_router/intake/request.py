"""A parsed and checked request, and the limits that it is held to."""

from dataclasses import dataclass
from typing import Any, Literal, Self

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_lib.api import quantity_bytes
from mmrouter_router.intake.inline_images import InlineImage
from mmrouter_router.intake.json_body import Raw
from mmrouter_router.intake.prompt_fields import Reason

Modality = Literal["image", "video", "audio"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request: bytes of the body; number of images and other media together."""

    max_request_bytes: int = 64 * 1024**2
    max_images: int = 32

    @classmethod
    def of(cls, media: MediaSettings) -> Self:
        return cls(quantity_bytes(media.max_request_bytes), media.max_images)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image: ``messages[message].content[part]``, its URL as the client wrote it, and the field of the URL."""

    message: int
    part: int
    url: str
    param: str
    inline: InlineImage | None = None
    """The image's bytes, where they were extracted from the body; the URL is then their placeholder."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """Media that the prompt does not model: video, audio, anything in a forwarded request.

    ``holder[key]`` is the field of its URL in the body. It is empty until :meth:`embed` puts the bytes there, so that
    no engine can see a client's URL.
    """

    holder: dict[str, Any]
    key: str
    url: str
    param: str
    kind: Modality

    def embed(self, data_uri: str) -> None:
        """Put the resolved bytes into the body."""
        self.holder[self.key] = data_uri


@dataclass(slots=True)  # not frozen: creation would take ten times as long
class ChatRequest:
    """A checked request; treat it as immutable. ``body`` is the parsed object, normalised; ``inexact`` is empty where
    the prompt is modelled.

    ``removed`` names the fields that intake removed because clients may not set them. A forwarded request (completions,
    responses) has no ``images`` and always a reason; its ``messages`` hold the beginning of its prompt as one user
    message, for affinity only.
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
    """The body as parsed: as received, or with placeholders for large images."""
