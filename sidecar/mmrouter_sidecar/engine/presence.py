"""The end of an engine that publishes no events, as soon as it comes: a connection that ends with the engine.

An engine with events connects to its sidecar, and the end of that connection tells
(:mod:`mmrouter_sidecar.engine.sockets`). Of
another one, such as an encoder, nothing would: asked once a second, one that is back within a second looks as if it had
never been away, and what it held would be taken for there. So here the sidecar connects, and says nothing.
"""

import asyncio
import contextlib
from collections.abc import Callable

AGAIN_SECONDS = 0.5
"""Between attempts while nobody listens."""
CONNECT_SECONDS = 2.0


async def watch(ip: str, port: int, ended: Callable[[], None]) -> None:
    """Call ``ended`` whenever the process that listens at an address has gone; runs until cancelled.

    A server may close a connection that says nothing, and a process of several may end. Then somebody listens still.
    """
    held: asyncio.StreamWriter | None = None
    try:
        while True:
            opened = await _connect(ip, port)
            if opened is None:
                if held is not None:
                    held = None
                    ended()
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if held is not None:
                await asyncio.sleep(AGAIN_SECONDS)  # no server is asked for connections all the time
            reader, held = opened
            await _until_closed(reader)
            held.close()
    finally:
        if held is not None:
            held.close()


async def _connect(ip: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """Return a connection, ``None`` where nobody takes one."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_SECONDS):
            return await asyncio.open_connection(ip, port)
    return None


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1024):
            pass
