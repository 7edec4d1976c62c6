"""A request as the engines get it: the client's fields without what clients may not set, and ours."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import orjson

from mmrouter_lib.engines.base.request import ImageRewrite
from mmrouter_router.http.upstream import Body
from mmrouter_router.media import Media

CHAT = "/v1/chat/completions"
_STRANGER: Final = secrets.token_hex(16)
"""Nobody outside knows it, so it stands nowhere but where it was put."""
UNSHOWN: Final = ""
"""What stands for an image's URL until it is known how the image travels: base64 of ten megabytes takes its time."""

Place = tuple[int, int]
"""Message and part."""


@dataclass(frozen=True)
class OutgoingImage:
    """One image part of a chat: where it stands, what the image is called, its bytes and its visual tokens."""

    message: int
    part: int
    uuid: str
    media: Media
    tokens: int = 0
    """0 where nobody has counted them."""

    @property
    def place(self) -> Place:
        """Where it stands."""
        return self.message, self.part

    @property
    def word(self) -> str:
        """What stands for the URL in a body whose pieces are put together afterwards."""
        return f"{_STRANGER}.{self.message}.{self.part}"

    @cached_property
    def url(self) -> str:
        """The bytes as a ``data:`` URI, made when somebody asks."""
        return self.media.data_uri()

    def rewrite(self, url: str = UNSHOWN) -> ImageRewrite:
        """What its part becomes."""
        return ImageRewrite(self.message, self.part, url, self.uuid)


@dataclass
class Outgoing:
    """A body for ``path``, in which nothing stands yet for its images. ``images``: in the order of the prompt."""

    path: str
    fields: Mapping[str, Any]
    images: tuple[OutgoingImage, ...] = ()

    @cached_property
    def plain(self) -> bytes:
        """The body for an engine that does everything itself."""
        return self.body(self.fields)

    def body(self, fields: Mapping[str, Any], shown: Mapping[Place, str | None] | None = None) -> bytes:
        """Return ``fields``, which are this request's with what other engines said, as JSON.

        ``shown``: place -> URL of an image, ``None`` for one that the engine has under its name; what is not in it is
        sent in the body.
        """
        return encode_body(self.shown(fields, shown or {}))

    def pieces(self, fields: Mapping[str, Any], shown: Mapping[Place, str | None] | None = None) -> Body:
        """Return what :meth:`body` returns; base64 that a client has sent is a piece of its own, and not copied."""
        shown = shown or {}
        ready = [image for image in self.images if image.place not in shown and image.media.text]
        if not ready:
            return self.body(fields, shown)
        rest = encode_body(self.shown(fields, {**shown, **{image.place: image.word for image in ready}}))
        found: list[bytes | memoryview] = []
        for image in ready:  # in the order of the prompt, which is that of the body
            before, _, rest = rest.partition(image.word.encode())
            found += (before, f"data:{image.media.mime};base64,".encode(), image.media.text)
        return (*found, rest)

    def shown(self, fields: Mapping[str, Any], shown: Mapping[Place, str | None]) -> Mapping[str, Any]:
        """Return what :meth:`body` makes JSON of."""
        bodied = {image.place: image.url for image in self.images if image.place not in shown}
        return _with_images(fields, {**shown, **bodied}) if self.images else fields


def _with_images(fields: Mapping[str, Any], urls: Mapping[Place, str | None]) -> dict[str, Any]:
    """Return a chat that shows its images so; ``fields`` stays as it is, and what does not change is shared with it."""
    messages = list(fields["messages"])
    for message, part in urls:
        content = messages[message]["content"]
        if content is fields["messages"][message]["content"]:
            messages[message] = {**messages[message], "content": (content := list(content))}
        url, kept = urls[message, part], content[part].get("image_url") or {}
        content[part] = {**content[part], "image_url": None if url is None else {**kept, "url": url}}
    return {**fields, "messages": messages}


def encode_body(body: object) -> bytes:
    """JSON for an engine."""
    return orjson.dumps(body)
