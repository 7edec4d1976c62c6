"""The HTTP API of mmrouter's vLLM plugin, which transfers processed images from renderers to engines.

A renderer's plugin answers a chat with *offers* of its processed images, under a lease; an engine's plugin accepts them
and keeps each image until a chat names it by ``uuid`` with ``image_url: null``. The router passes offers on unchanged.
After a cache miss (:func:`is_cache_miss`) and for every refused image the chat carries the bytes (docs/transfer.md,
handover/README.md).
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, get_args

import msgspec

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.vllm.stage_requests import read_rendered
from mmrouter_lib.engines.vllm.stage_requests import render_request as plain_render_request

STATUS_PATH: Final = "/v1/mmrouter/handover"
RENDER_PATH: Final = "/v1/mmrouter/render"
ITEMS_PATH: Final = "/v1/mmrouter/items"
RELEASE_PATH: Final = "/v1/mmrouter/release"
WIRE_VERSION: Final = 1

Way = Literal["shm", "nixl", "inline"]
"""Transfer of a processed image: a slot on the node's shared tmpfs, a NIXL read, or base64 in the requests."""
WAYS: Final[tuple[Way, ...]] = get_args(Way)

Reason = Literal[
    "absent",
    "corrupt",
    "disabled",
    "failed",
    "full",
    "gone",
    "large",
    "other",
    "prompt",
    "refused",
    "settings",
    "stale",
    "truncated",
    "uncached",
    "unnamed",
]
"""Why an image was not transferred.

``absent``: no shared folder, or no NIXL, on this side. ``disabled``: the plugin does not support this vLLM.
 ``failed``: a NIXL read. ``large``: above the limit of inline transfers. ``prompt``: the model's prompt depends on
more than the processed image. ``settings``: the two sides process differently. ``uncached``: a server runs without its
processor cache, or it did not keep the image. ``unnamed``: the renderer gave the image another identifier.
``other``: a reason of a later release. The rest are reasons of ``mmrouter_handover.shm``.
"""
_REASONS: Final[frozenset[str]] = frozenset(get_args(Reason))

_MISS: Final = b"Cache miss for "
"""The text of a 400 when vLLM 0.32 does not hold an image (docs/engine-facts/vllm.md#image-uuid)."""

T = TypeVar("T")


class HandoverError(ValueError):
    """An answer of the plugin cannot be used; the message says why."""


class Status(msgspec.Struct, frozen=True):
    """A server's plugin; equal ``settings`` process images alike. ``ways``: way -> why it is not offered, or empty."""

    version: int
    role: Literal["renderer", "engine"]
    enabled: bool
    reason: str = ""
    engine: str = ""
    settings: str = ""
    node: str = ""
    ways: dict[str, str] = {}

    def offers(self, way: Way) -> bool:
        return self.enabled and self.version == WIRE_VERSION and self.ways.get(way) == ""


class Offer(msgspec.Struct, frozen=True):
    """One processed image of a renderer. ``raw`` is its JSON, passed on unchanged; ``length`` is in bytes."""

    way: Way
    length: int
    raw: bytes


class Rendered(msgspec.Struct, frozen=True):
    """A renderer's answer: the prompt, and its offers.

    ``ids`` and ``spans`` as in ``read_rendered``; ``offers`` and ``withheld`` by the image's wire identity. ``fell``
    has the preferred ways that were not available, with the reason, one entry for each image.
    """

    ids: "array[int]"
    spans: tuple[Span, ...]
    lease: str
    offers: dict[str, Offer]
    withheld: dict[str, Reason]
    fell: tuple[tuple[Way, Reason], ...] = ()


class Taken(msgspec.Struct, frozen=True):
    """An engine's answer: the images that it holds for a chat, and why it does not hold the others."""

    held: frozenset[str]
    refused: dict[str, str] = {}


class _Offer(msgspec.Struct):
    way: Way
    length: int


class _Rendered(msgspec.Struct):
    lease: str
    offers: dict[str, msgspec.Raw] = {}
    withheld: dict[str, str] = {}
    fell: list[tuple[Way, str]] = []


def read_status(raw: bytes) -> Status:
    """Return the state of a plugin. Raises :class:`HandoverError`."""
    return _decode(raw, Status)


def render_request(
    body: Mapping[str, Any],
    *,
    ways: Sequence[Way],
    seconds: float,
    images: Iterable[str] | None = None,
    inline_bytes: int = 0,
) -> dict[str, Any]:
    """Return the request to render ``body``, a chat of ``rewrite_chat``, and to offer its images.

    ``ways``: in the order in which they are tried for each image. ``seconds``: lifetime of an offer. ``images``:
    identities to offer, by default all. ``inline_bytes``: the largest processed image that may travel inline.
    """
    wanted = None if images is None else sorted(set(images))
    chat = plain_render_request(body)
    return {"chat": chat, "ways": list(ways), "seconds": seconds, "images": wanted, "inline_bytes": inline_bytes}


def read_render(raw: bytes) -> Rendered:
    """Return a renderer's answer. Raises :class:`HandoverError`, and for the prompt what ``read_rendered`` raises."""
    answer = _decode(raw, _Rendered)
    ids, spans = read_rendered(raw)
    offers: dict[str, Offer] = {}
    for name, offered in answer.offers.items():
        offer = _decode(bytes(offered), _Offer)
        offers[name] = Offer(offer.way, offer.length, bytes(offered))
    withheld = {name: _reason(reason) for name, reason in answer.withheld.items()}
    fell = tuple((way, _reason(reason)) for way, reason in answer.fell)
    return Rendered(ids, spans, answer.lease, offers, withheld, fell)


def items_request(offers: Mapping[str, Offer], *, seconds: float) -> bytes:
    """Return the request that makes an engine fetch these offers and keep each image for at most ``seconds``."""
    items = {name: msgspec.Raw(offer.raw) for name, offer in offers.items()}
    return msgspec.json.encode({"items": items, "seconds": seconds})


def read_items(raw: bytes) -> Taken:
    """Return which images an engine holds. Raises :class:`HandoverError`."""
    taken = _decode(raw, Taken)
    return Taken(taken.held, {name: _reason(reason) for name, reason in taken.refused.items()})


def release_request(lease: str) -> dict[str, Any]:
    """Return the request that ends a lease; without effect when the lease has ended."""
    return {"lease": lease}


def is_cache_miss(status: int, raw: bytes) -> bool:
    """Whether an engine's answer reports that it does not hold an image that a chat named without bytes."""
    return status == 400 and _MISS in raw


def _reason(reason: str) -> Reason:
    return reason if reason in _REASONS else "other"  # type: ignore[return-value] # one of the literals, as was looked up


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandoverError(f"not an answer of the plugin: {error}") from error
