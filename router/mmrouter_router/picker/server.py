"""The gRPC server of the endpoint picker: ext_proc for gateways, and gRPC health."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from mmrouter_router.http.certificate import KeyAndChain
from mmrouter_router.http.engine_connection import address
from mmrouter_router.http.server import Shutdown
from mmrouter_router.picker.exchange import Stream
from mmrouter_router.picker.protocol import BrokenOffError, ProtocolError
from mmrouter_router.picker.wire import (
    EXT_PROC_SERVICE,
    HEALTH_SERVICE,
    NOT_SERVING,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
)

log = logging.getLogger("mmrouter.picker")

PICKER_PORT: Final = 9002
MAX_MESSAGE: Final = 16 << 20  # bytes of one message: a gateway sends a body in pieces of its buffer's size
READINESS: Final = frozenset({"", "readiness", EXT_PROC_SERVICE})  # services that are up while requests can be placed
LIVENESS: Final = "liveness"


class Picker:
    """Serves gateways until ``shutdown`` stops it, and answers what is under way."""

    def __init__(
        self,
        handle: Callable[[Stream, Any], Awaitable[None]],
        shutdown: Shutdown,
        ready: Callable[[], bool],
        *,
        host: str,
        port: int = PICKER_PORT,
        certificate: Callable[[], KeyAndChain] | None = None,
    ) -> None:
        """``handle``: serves a stream, whose first message it gets too (:mod:`.engines`, :mod:`.frontends`).

        ``certificate``: serve TLS with what it returns at each new connection.
        """
        self._handle, self._shutdown, self._ready = handle, shutdown, ready
        self.requests = 0
        """Requests that gateways have asked about."""
        self._address, self._certificate = address(host, port), certificate
        options = (("grpc.max_receive_message_length", MAX_MESSAGE), ("grpc.so_reuseport", 0))
        self._server = grpc.aio.server(options=options)
        process = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=ProcessingRequest.FromString, response_serializer=_serialized
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check, request_deserializer=HealthCheckRequest.FromString, response_serializer=_serialized
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler(HEALTH_SERVICE, {"Check": check}),
            )
        )

    async def serve(self, drain_seconds: float) -> None:
        """Serve until the shutdown, then answer what is under way. Raises ``RuntimeError`` for an address in use."""
        if self._certificate is None:
            self._server.add_insecure_port(self._address)
        else:
            self._server.add_secure_port(self._address, _credentials(self._certificate))
        await self._server.start()
        log.info("listening for gateways on %s", self._address)
        await self._shutdown.stopping.wait()
        await self._server.stop(drain_seconds)

    async def _check(self, request: Any, context: Any) -> Any:
        if request.service == LIVENESS:
            return HealthCheckResponse(status=SERVING)
        if request.service not in READINESS:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return HealthCheckResponse(status=SERVING if self._ready() else NOT_SERVING)

    async def _process(self, _: Any, context: Any) -> None:
        """Answer one request."""
        stream = _Stream(context, self._shutdown)
        first = await stream.read()
        if first is None:
            return  # a gateway may open a stream and find that it has nothing to ask
        self.requests += 1
        try:
            await self._handle(stream, first)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except BrokenOffError:
            await context.abort(grpc.StatusCode.ABORTED, "the answer broke off")


class _Stream:
    """A stream of the server (:class:`.exchange.Stream`)."""

    def __init__(self, context: Any, shutdown: Shutdown) -> None:
        self._context, self._shutdown = context, shutdown
        self.write = context.write

    def cancelled(self) -> bool:
        # gRPC cancels the task of a stream that the gateway ends, and those of all streams behind the drain time.
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0 and not self._shutdown.stopping.is_set()

    async def read(self) -> Any:
        message = await self._context.read()
        return None if message is grpc.aio.EOF else message


def _credentials(certificate: Callable[[], KeyAndChain]) -> Any:
    """Return credentials by which each new connection gets the certificate that is loaded by then."""
    used = certificate()

    def changed() -> Any:
        nonlocal used
        if certificate() == used:
            return None
        used = certificate()
        return grpc.ssl_server_certificate_configuration([used])

    return grpc.dynamic_ssl_server_credentials(grpc.ssl_server_certificate_configuration([used]), changed)


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())
