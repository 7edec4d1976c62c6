"""Places each request of a gateway on an engine, by the same stages as a frontend's own requests."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from mmrouter_lib.engines.base.request_fields import RESPONSES
from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.client_channel import Client, Headers, Message
from mmrouter_router.picker.exchange import Exchange, Stream
from mmrouter_router.picker.protocol import BrokenOffError, ProtocolError

log = logging.getLogger("mmrouter.picker")

JSON: Final[Headers] = [(b"content-type", b"application/json")]
MAX_COLD_ANSWER: Final = 64 << 20
"""Bytes of an answer that is not an engine's to a routed request: it is sent to the gateway as one message."""


class EngineChoice:
    """Handles one stream of a gateway: a request from the client's headers to the end of the engine's answer."""

    def __init__(
        self,
        app: Any,
        hot: Collection[str],
        answer: Callable[[Client], Awaitable[None]],
        *,
        test_selection: bool = False,
    ) -> None:
        """``answer``: handles requests for the ``hot`` paths; ``app``, an ASGI app, those for all others.

        ``test_selection``: obey the header by which conformance tests choose the endpoint.
        """
        self._app, self._hot, self._answer, self._test_selection = app, hot, answer, test_selection

    async def __call__(self, stream: Stream, first: Any) -> None:
        """Serve a request. Raises :class:`.protocol.ProtocolError` and :class:`.protocol.BrokenOffError`."""
        exchange = Exchange(stream, first, test_selection=self._test_selection)
        try:
            if exchange.path in self._hot:
                await self._answer(exchange)
            else:
                await self._answer_cold(exchange)
        finally:
            exchange.close()
        if exchange.fault:
            raise ProtocolError(exchange.fault)
        if not exchange.answered:
            raise BrokenOffError

    async def _answer_cold(self, exchange: Exchange) -> None:
        """Answer by the ASGI app, which reads no body, so that nothing of one is held."""
        status, body = 500, bytearray()
        headers: Headers = ()
        asked = False

        async def receive() -> Message:
            nonlocal asked
            if asked:  # for the client's disconnect, at which this task is cancelled
                await asyncio.get_running_loop().create_future()
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message["headers"])
            else:
                body.extend(message.get("body", b""))
                if len(body) > MAX_COLD_ANSWER:
                    raise BufferError("the answer is too large for a gateway")

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": exchange.method,
            "path": unquote(exchange.path),
            "raw_path": exchange.path.encode("latin-1"),
            "root_path": "",
            "query_string": exchange.query.encode("latin-1"),
            "headers": list(exchange.headers),
            "client": None,
            "server": None,
        }
        try:
            if exchange.path.startswith(f"{RESPONSES}/") and ("stream", "true") in parse_qsl(exchange.query):
                message = "A stored response cannot be streamed through a gateway."
                raise RequestError.invalid(message, param="stream", code="unsupported_parameter")
            await self._app(scope, receive, send)
        except RequestError as error:
            status, headers, body = error.status, JSON, bytearray(error.to_body())
        except Exception:  # an error of any kind in one request is answered 500, as the frontend's listener does
            log.exception("%s: request failed", exchange.path)
            internal = RequestError.internal()
            status, headers, body = internal.status, JSON, bytearray(internal.to_body())
        await exchange.respond(status, headers, bytes(body))
