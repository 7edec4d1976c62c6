"""Request and response bodies of the plugin's routes; ``mmrouter_lib.engines.vllm.handover`` is the router's side."""

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from mmrouter_handover.plugin import WIRE_VERSION

STATUS_PATH = "/v1/mmrouter/handover"
RENDER_PATH = "/v1/mmrouter/render"
ITEMS_PATH = "/v1/mmrouter/items"
RELEASE_PATH = "/v1/mmrouter/release"

Way = Literal["shm", "nixl", "inline"]
WAYS: tuple[Way, ...] = ("shm", "nixl", "inline")
MAX_SECONDS = 600.0

Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
Length = Annotated[int, msgspec.Meta(ge=0, le=(1 << 40))]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]

T = TypeVar("T")


class HandOverFailed(Exception):  # noqa: N818 - an outcome, with a reason for a counter
    """An image was not handed over. ``reason`` is a ``mmrouter_lib.engines.vllm.handover.Reason``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class BadRequest(ValueError):  # noqa: N818 - named after its HTTP status
    """A request cannot be read; the message says why."""


class RenderRequest(msgspec.Struct):
    """``chat`` is passed to vLLM unchanged. ``images``: names to offer, ``None`` for all."""

    chat: msgspec.Raw
    ways: list[Way]
    seconds: Seconds
    images: list[Name] | None = None
    inline_bytes: Length = 0


class Shm(msgspec.Struct, frozen=True, tag="shm", tag_field="way"):
    """A packed item in a slot of the node's shared tmpfs; ``handle`` is one of ``mmrouter_handover.shm``."""

    length: Length
    handle: dict[str, Any]


class Inline(msgspec.Struct, frozen=True, tag="inline", tag_field="way"):
    """A packed item in the request itself, in base64."""

    length: Length
    data: bytes


class Nixl(msgspec.Struct, frozen=True, tag="nixl", tag_field="way"):
    """A packed item in registered memory of a NIXL agent.

    ``generation`` is stored in eight bytes at ``address``, the item ``HEAD_BYTES`` after it. The generation is zeroed
    before the memory is reused, so a reader that finds it unchanged after its read has read the item.
    """

    length: Length
    agent: Name
    metadata: bytes
    address: Annotated[int, msgspec.Meta(ge=0)]
    generation: Annotated[int, msgspec.Meta(ge=1)]
    checksum: int


Offer = Shm | Inline | Nixl


class ItemsRequest(msgspec.Struct):
    """Offers by name; each fetched item is kept for ``seconds`` at most."""

    items: dict[Name, Offer]
    seconds: Seconds


class ReleaseRequest(msgspec.Struct):
    lease: str


class Rendered(msgspec.Struct):
    """``token_ids`` and ``features`` are those of vLLM's own answer."""

    token_ids: list[int]
    features: Any
    lease: str
    offers: dict[str, Offer]
    withheld: dict[str, str]
    fell: list[tuple[str, str]]


class Taken(msgspec.Struct):
    held: list[str]
    refused: dict[str, str]


class Released(msgspec.Struct):
    released: int


class Status(msgspec.Struct):
    """``ways``: way -> reason why it is not offered, or empty. ``counts`` is for people and tests."""

    role: str
    enabled: bool
    reason: str
    engine: str
    settings: str
    node: str
    ways: dict[str, str]
    counts: dict[str, int]
    version: int = WIRE_VERSION


def read(raw: bytes, kind: type[T]) -> T:
    """Decode a request body. Raises :class:`BadRequest`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(str(error)) from error


def error(status: int, message: str) -> bytes:
    """Return the body of an error response, in the shape of vLLM's own."""
    return msgspec.json.encode({"error": {"message": message, "type": "mmrouter", "param": None, "code": status}})
