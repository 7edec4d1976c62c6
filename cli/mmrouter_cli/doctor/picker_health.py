"""Asks an endpoint picker for its gRPC health as a gateway does: by TLS with any certificate, or by plain HTTP/2."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import NamedTuple

from mmrouter_cli.status.control_api import ANSWER_SECONDS, Unread


class PickerHealth(NamedTuple):
    """``tls``: whether the port serves TLS, ``None`` where it answers nothing. ``fault``: empty where a gateway's
    requests are served.
    """

    tls: bool | None
    fault: str = ""


async def picker_health(host: str, port: int, seconds: float = ANSWER_SECONDS) -> PickerHealth | Unread:
    """Ask for the service by whose health gateways choose pickers. ``seconds``: of each step."""
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except ConnectionRefusedError:
        return PickerHealth(None, "refuses connections")
    except (OSError, TimeoutError) as error:
        return Unread(f"it is not reachable from here: {error or 'no answer'}")
    if find_spec("grpc") is None:
        return Unread("grpcio is not installed here: pip install 'mmrouter-k8s[router]' installs it")
    if await _serves_tls(host, port, seconds):
        async with _without_tls(host, port) as address:
            return PickerHealth(True, await _fault(address, seconds))
    fault = await _fault(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", seconds)
    if fault.startswith(("answers UNAVAILABLE", "answers DEADLINE_EXCEEDED")):
        return PickerHealth(None, "answers neither TLS nor plain HTTP/2")
    return PickerHealth(False, fault)


async def _fault(address: str, seconds: float) -> str:
    """Return what is wrong with a picker without TLS, empty if nothing is."""
    import grpc.aio

    from mmrouter_router.picker.wire import (
        EXT_PROC_SERVICE,
        HEALTH_SERVICE,
        SERVING,
        HealthCheckRequest,
        HealthCheckResponse,
    )

    request = HealthCheckRequest(service=EXT_PROC_SERVICE).SerializeToString()
    # Without a pool of its own gRPC would use a connection to an earlier server of this address.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        check = channel.unary_unary(f"/{HEALTH_SERVICE}/Check", response_deserializer=HealthCheckResponse.FromString)
        try:
            answer = await check(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            return f"answers {error.code().name} instead of its health: {error.details()}"
    return "" if answer.status == SERVING else f"reports NOT_SERVING for {EXT_PROC_SERVICE}"


async def _serves_tls(host: str, port: int, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host, port, ssl=_any_certificate())
    except (OSError, TimeoutError):  # ssl.SSLError is an OSError
        return False
    writer.close()
    return True


@asynccontextmanager
async def _without_tls(host: str, port: int) -> AsyncIterator[str]:
    """Yield the address of a relay to a server with TLS, which verifies no certificate; gRPC's client always does."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(host, port, ssl=_any_certificate())
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    relays: list[asyncio.Task[None]] = []
    async with await asyncio.start_server(
        lambda *streams: relays.append(asyncio.create_task(relay(*streams))), "127.0.0.1", 0
    ) as server:
        own = server.sockets[0].getsockname()
        try:
            yield f"{own[0]}:{own[1]}"
        finally:
            # Python 3.11 prints a traceback for one of the server's own tasks that the end of the loop cancels.
            for task in relays:
                task.cancel()
            await asyncio.gather(*relays, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def _any_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
