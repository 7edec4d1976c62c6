"""Send a request to one engine, its images by the cheapest way that leads there (docs/transfer.md).

The image's bytes stay with the router until the answer begins: they are the re-fetch handle of every hand-over. An
engine that does not find what was handed over is sent the same request with bytes, so no hand-over fails a request.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mmrouter_router.fleet.workers import Worker
from mmrouter_router.http.upstream import Body
from mmrouter_router.request.engine_request import Outgoing


class Answered(Protocol):
    """An engine's answer, whoever gets it."""

    @property
    def status(self) -> int:
        """Its HTTP status."""
        ...

    async def said(self) -> bytes:
        """Return the text of an error; empty of any other answer."""
        ...

    def drop(self) -> None:
        """Nobody gets this answer."""


T = TypeVar("T", bound=Answered)
Post = Callable[[Body], Awaitable[T]]
"""Body -> answer, of one and the same engine. Raises ``UpstreamError``."""


@dataclass(frozen=True, slots=True)
class Said:
    """An engine's whole answer, for the router and not for a client."""

    status: int
    raw: bytes

    async def said(self) -> bytes:
        """Return the text of an error; empty of any other answer."""
        return self.raw if self.status >= 400 else b""

    def drop(self) -> None:
        """Its connection was given back when it had been read."""


@dataclass(slots=True)
class Parcel:
    """What one engine is to be sent: a request, and its fields with what other engines said of it."""

    worker: Worker
    outgoing: Outgoing
    fields: Mapping[str, Any]

    @property
    def plain(self) -> Body:
        """The body with the bytes of all images."""
        return self.outgoing.pieces(self.fields)


class Delivery(Protocol):
    """A way to send parcels."""

    async def send(self, parcel: Parcel, post: Post[T], told: list[dict[str, Any]]) -> T:
        """Send it and return the answer, its first byte there. ``told`` gets how each image travelled.

        Raises what ``post`` raises.
        """
        ...


class ByBytes:
    """Every image in the body."""

    async def send(self, parcel: Parcel, post: Post[T], told: list[dict[str, Any]]) -> T:
        """Send it."""
        return await post(parcel.plain)
