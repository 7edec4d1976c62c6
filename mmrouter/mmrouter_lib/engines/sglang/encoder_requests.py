"""``/encode`` requests of SGLang's language engines, and the order in which encoders are tried for an image.

A language engine distributes the images of a request at random over the encoder URLs that it was started with, and
posts each share to ``<url>/encode``; the encoder pushes the embeddings to the engine over another connection and
answers ``null`` (docs/engine-facts/sglang.md#encoder-disaggregation). The engine is started with more URLs than
requests usually have images, all of them the sidecar's. Each share is then one image, and the sidecar chooses the
encoder.

An image should keep to one encoder: the engine identifies it by its embedding, and two devices do not compute equal
bits, so an image that moves misses the engine's cache.
"""

from collections.abc import Collection, Iterable, Mapping
from math import ceil
from typing import Final

import msgspec
from blake3 import blake3

PORT: Final = 8002
"""Port of the sidecar's encoder proxy, on the pod's loopback."""
SLOTS: Final = 16
"""Encoder URLs of an engine. With more images in a request, some share a URL and go where the first of them goes."""
TRANSFER: Final = "zmq_to_tokenizer"
"""Transfer backend of embeddings. With any other, an encoder that fails ends the language engine (0.5.23), whose
scheduler fails on a request without token ids; with this one the request is answered 503."""
PATH: Final = "/encoders/{slot}/encode"
ENCODE: Final = "/encode"
BOUND: Final = 1.5
"""Load bound of the hashing: an encoder gets at most this multiple of its share of the images being encoded."""


class PartError(ValueError):
    """The body is no ``/encode`` request; the message says why."""


class Encoder(msgspec.Struct, frozen=True, array_like=True):
    """An encoder pod. Images are hashed to ``name``, which unlike the address survives a restart."""

    name: str
    ip: str


class _Part(msgspec.Struct):
    req_id: str
    mm_items: list[msgspec.Raw]


def urls(loopback: str) -> list[str]:
    """Return the encoder URLs of a language engine."""
    return [f"http://{loopback}:{PORT}{PATH.format(slot=slot).removesuffix(ENCODE)}" for slot in range(SLOTS)]


def image_key(body: bytes) -> bytes:
    """Return the hash of the (first) image of an ``/encode`` request: of its URL and options.

    Raises :class:`PartError`.
    """
    try:
        part = msgspec.json.decode(body, type=_Part)
    except msgspec.DecodeError as error:
        raise PartError(str(error)) from error
    if not part.mm_items:
        raise PartError("there is nothing to encode")
    return blake3(bytes(part.mm_items[0])).digest()


def ranked(key: bytes, encoders: Iterable[Encoder]) -> list[Encoder]:
    """Return encoders in rendezvous order: each image has its own, and an encoder that leaves moves only its images."""
    return sorted(encoders, key=lambda encoder: blake3(encoder.name.encode() + b"\0" + key).digest(), reverse=True)


def order(
    key: bytes, encoders: Collection[Encoder], busy: Mapping[str, Collection[bytes]], down: Collection[str]
) -> list[Encoder]:
    """Return the order in which encoders are tried for an image.

    ``busy``: name -> keys of the images it encodes now; another request for one of them adds no work. ``down``: names
    of encoders that failed recently; they come last, because one may be back.
    """
    images = set().union(*busy.values(), (key,))
    able = [encoder for encoder in encoders if encoder.name not in down]
    limit = ceil(BOUND * len(images) / max(1, len(able)))

    def rank(encoder: Encoder) -> int:
        if encoder.name in down:
            return 2
        held = busy.get(encoder.name, ())
        return int(key not in held and len(held) >= limit)

    return sorted(ranked(key, encoders), key=rank)
