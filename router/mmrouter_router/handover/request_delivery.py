"""Deliver a request to one engine, with its images by the cheapest way that leads there (docs/transfer.md).

The router keeps the images' bytes until the answer begins. An engine that does not find a handed over image is sent the
same request with bytes, so no hand-over fails a request.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mmrouter_router.fleet.workers import Worker
from mmrouter_router.http.engine_connection import Body
from mmrouter_router.request.prepared import Outgoing


class EngineAnswer(Protocol):
    """An engine's answer, for a client or for the router."""

    @property
    def status(self) -> int: ...

    async def error_text(self) -> bytes: ...

    def drop(self) -> None:
        """Release an answer that is not used."""


T = TypeVar("T", bound=EngineAnswer)
Post = Callable[[Body], Awaitable[T]]  # body -> answer, of one and the same engine. Raises ``UpstreamError``.


@dataclass(frozen=True, slots=True)
class BufferedAnswer:
    """An engine's complete answer to a request of the router's own."""

    status: int
    raw: bytes

    async def error_text(self) -> bytes:
        """Return the text of an error; empty for any other answer."""
        return self.raw if self.status >= 400 else b""

    def drop(self) -> None:
        """Nothing to release: the connection was returned when the answer had been read."""


@dataclass(slots=True)
class AddressedRequest:
    """A request for one engine. ``fields``: the body's, with other engines' parameters."""

    worker: Worker
    outgoing: Outgoing
    fields: Mapping[str, Any]

    async def plain(self) -> Body:
        """Return the body with all images by their bytes."""
        return await self.outgoing.written(self.fields)


class Delivery(Protocol):
    """A way to deliver requests."""

    async def send(self, request: AddressedRequest, post: Post[T], transfers: list[dict[str, Any]]) -> T:
        """Return the answer once its first byte is there. Appends each image's transfer to ``transfers``.

        Raises what ``post`` raises.
        """
        ...


class BytesDelivery:
    """Sends every image in the body."""

    async def send(self, request: AddressedRequest, post: Post[T], transfers: list[dict[str, Any]]) -> T:
        return await post(await request.plain())
