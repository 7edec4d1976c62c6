"""What the router uses of a gateway that sends requests to engines itself, at the address which the router answers.

:mod:`mmrouter_router.picker` implements it. A gateway's request is sent once: what must be repeated is the gateway's
own affair.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from mmrouter_router.http.engine_connection import Body, Source


class GatewayAnswer(Source, Protocol):
    """An engine's answer as the gateway passes it on: what the router uses of an :class:`.upstream.Answer`."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]: ...

    @property
    def complete(self) -> bool: ...

    def close(self) -> None: ...


class Gateway(Protocol):
    """The gateway of one request."""

    def allows(self, ip: str, port: int) -> bool:
        """Whether the gateway accepts this address as the request's destination."""

    def served_elsewhere(self, ip: str, port: int) -> str:
        """Return the address that the gateway reports to have used, empty where it is this one or is not reported."""

    async def request(
        self, host: str, port: int, method: str, path: str, headers: Mapping[str, str], body: Body = b""
    ) -> GatewayAnswer:
        """Let the gateway send the request, which replaces the client's; return at the answer's headers.

        Raises :class:`.engine_connection.UpstreamError` where the gateway ends the exchange before them.
        """
