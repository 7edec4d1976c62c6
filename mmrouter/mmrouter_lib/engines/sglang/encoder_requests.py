"""What SGLang's language engines ask encoders for, and in which order encoders are asked for an image. Pure.

A language engine spreads the images of a request at random over the encoder URLs that it was started with, and posts
each share to ``<url>/encode``; the encoder sends the embeddings to the engine by another way and answers ``null``
(docs/engine-facts/sglang.md#encoder-disaggregation). So the engine gets as many URLs as requests usually have
images, all of them the sidecar's: each
share is then one image, and the sidecar chooses.

Which encoder encodes an image decides more than the work: the engine names an image by its embedding, and two devices
do not compute one to the last bit. An image that moves is another one to the engine's cache.
"""

from collections.abc import Collection, Iterable, Mapping
from math import ceil
from typing import Final

import msgspec
from blake3 import blake3

PORT: Final = 8002
"""Where the sidecar listens, on the pod's loopback."""
SLOTS: Final = 16
"""URLs that an engine is given. Of a request with more images some travel together, and go where the first one goes."""
TRANSFER: Final = "zmq_to_tokenizer"
"""How embeddings travel. With any other way an encoder that fails ends the language engine (0.5.23): its scheduler
fails on a request that has no token ids yet. With this one the request is answered 503."""
PATH: Final = "/encoders/{slot}/encode"
ENCODE: Final = "/encode"
BOUND: Final = 1.5
"""An encoder has at most so many times its share of the images that are being encoded; the others go to the next."""


class PartError(ValueError):
    """A request is no share of one that is to be encoded; the message says why."""


class Encoder(msgspec.Struct, frozen=True, array_like=True):
    """An encoder pod. ``name`` is what images keep to, so it is the pod's and not its address."""

    name: str
    ip: str


class _Part(msgspec.Struct):
    req_id: str
    mm_items: list[msgspec.Raw]


def urls(loopback: str) -> list[str]:
    """Return the encoder URLs of a language engine."""
    return [f"http://{loopback}:{PORT}{PATH.format(slot=slot).removesuffix(ENCODE)}" for slot in range(SLOTS)]


def image_key(body: bytes) -> bytes:
    """Return what names the image of an ``/encode`` request, of several the first: its URL with its options.

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
    """Return encoders by rendezvous: each image has an order of its own, and one that leaves moves only its images."""
    return sorted(encoders, key=lambda encoder: blake3(encoder.name.encode() + b"\0" + key).digest(), reverse=True)


def order(
    key: bytes, encoders: Collection[Encoder], busy: Mapping[str, Collection[bytes]], down: Collection[str]
) -> list[Encoder]:
    """Return in which order encoders are asked for an image.

    ``busy``: name -> keys of the images that it encodes now. Another request for one of them is no more work: it finds
    the embedding. ``down``: names of those that failed a moment ago; they come last, because one may be back.
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
