"""Serialisation of a request for engines: the client's allowed fields, the router's fields, and the images."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import orjson

from mmrouter_lib.engines.base.request_rewriting import ImageRewrite
from mmrouter_router.http.upstream import Body
from mmrouter_router.media import Media

CHAT = "/v1/chat/completions"
_SECRET: Final = secrets.token_hex(16)
"""Makes placeholders unguessable, so that none occurs in a client's text."""
NO_URL: Final = ""
"""An image's URL until its way to the engine is chosen, because encoding megabytes as base64 is slow."""

Place = tuple[int, int]
"""Indices of message and part."""


@dataclass(frozen=True)
class OutgoingImage:
    """One image part of a chat."""

    message: int
    part: int
    uuid: str
    media: Media
    tokens: int = 0
    """Visual tokens, 0 where unknown."""

    @property
    def place(self) -> Place:
        return self.message, self.part

    @property
    def placeholder(self) -> str:
        """Stands for the URL in a body that is sent in pieces."""
        return f"{_SECRET}.{self.message}.{self.part}"

    @cached_property
    def url(self) -> str:
        """The bytes as a ``data:`` URI."""
        return self.media.data_uri()

    def rewrite(self, url: str = NO_URL) -> ImageRewrite:
        return ImageRewrite(self.message, self.part, url, self.uuid)


@dataclass
class Outgoing:
    """A request for ``path`` whose image URLs are still empty. ``images``: in prompt order."""

    path: str
    fields: Mapping[str, Any]
    images: tuple[OutgoingImage, ...] = ()

    @cached_property
    def plain(self) -> bytes:
        """The body for an engine that encodes and prefills itself: all images by their bytes."""
        return self.body(self.fields)

    def body(self, fields: Mapping[str, Any], urls: Mapping[Place, str | None] | None = None) -> bytes:
        """Return ``fields``, this request's with those added by other engines, as JSON.

        ``urls``: place -> URL of an image, ``None`` for one that the engine has under its uuid; other images are sent
        by their bytes.
        """
        return encode_body(self.with_images(fields, urls or {}))

    def pieces(self, fields: Mapping[str, Any], urls: Mapping[Place, str | None] | None = None) -> Body:
        """Return what :meth:`body` returns, in pieces; the client's own base64 is a piece that is not copied."""
        urls = urls or {}
        uncopied = [image for image in self.images if image.place not in urls and image.media.text]
        if not uncopied:
            return self.body(fields, urls)
        tail = encode_body(self.with_images(fields, {**urls, **{image.place: image.placeholder for image in uncopied}}))
        pieces: list[bytes | memoryview] = []
        for image in uncopied:  # in prompt order, which is the order in the body
            before, _, tail = tail.partition(image.placeholder.encode())
            pieces += (before, f"data:{image.media.mime};base64,".encode(), image.media.text)
        return (*pieces, tail)

    def with_images(self, fields: Mapping[str, Any], urls: Mapping[Place, str | None]) -> Mapping[str, Any]:
        """Return ``fields`` with the URLs of all images."""
        inline = {image.place: image.url for image in self.images if image.place not in urls}
        return _with_images(fields, {**urls, **inline}) if self.images else fields


def _with_images(fields: Mapping[str, Any], urls: Mapping[Place, str | None]) -> dict[str, Any]:
    """Return a copy of a chat with these URLs; it shares unchanged parts with ``fields``, which is not modified."""
    messages = list(fields["messages"])
    for message, part in urls:
        content = messages[message]["content"]
        if content is fields["messages"][message]["content"]:
            messages[message] = {**messages[message], "content": (content := list(content))}
        url, options = urls[message, part], content[part].get("image_url") or {}
        content[part] = {**content[part], "image_url": None if url is None else {**options, "url": url}}
    return {**fields, "messages": messages}


def encode_body(body: object) -> bytes:
    return orjson.dumps(body)
