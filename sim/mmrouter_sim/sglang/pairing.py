"""How simulated SGLang engines of a pair meet: rooms at the prefill engine's bootstrap port.

See docs/engine-facts/sglang.md#prefill-decode.

Each waits for the other: a prefill engine computes nothing before the decode engine of its room is there, and answers
once that one has the blocks. As with the other side channel, what a real transfer moves nobody else sees, so the wire
is the simulators' own: a line names a room, one says how many tokens are there, a third that they are copied.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import Literal

import msgspec

from mmrouter_sim.core.step_cost import Cost
from mmrouter_sim.vllm.connectors import CONNECT_SECONDS, TransferError

HOST_HEADER, PORT_HEADER, ROOM_HEADER = (f"x-override-bootstrap-{name}" for name in ("host", "port", "room"))
WAIT_SECONDS = 300
"""How long an engine waits for its partner (``SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT``, ``.._WAITING_TIMEOUT``)."""


class Side(msgspec.Struct, frozen=True):
    """Which side of pairs an engine is. ``address``: where a prefill engine's bootstrap server listens."""

    mode: Literal["prefill", "decode"]
    address: tuple[str, int]
    bootstrap_seconds: float = WAIT_SECONDS
    waiting_seconds: float = WAIT_SECONDS


def side(mode: str, host: str, port: int) -> Side | None:
    """Return what flags and environment say; ``None``: the engine serves requests whole. Raises ``ValueError``."""
    if mode == "null":
        return None
    return msgspec.convert(
        {
            "mode": mode,
            "address": (host, port),
            "bootstrap_seconds": float(os.environ.get("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", WAIT_SECONDS)),
            "waiting_seconds": float(os.environ.get("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", WAIT_SECONDS)),
        },
        type=Side,
    )


class Place(msgspec.Struct, frozen=True):
    """Where one request meets its other half."""

    host: str
    port: int
    room: int


def place(headers: Mapping[str, str]) -> Place | None:
    """Return what a request's headers say, ``None`` without a room. Raises ``ValueError`` as the engine does."""
    room = headers.get(ROOM_HEADER)
    if room is None:
        return None
    return Place(headers.get(HOST_HEADER, ""), int(headers.get(PORT_HEADER, "8998")), int(room))


class _Knock(msgspec.Struct):
    room: int


class _Here(msgspec.Struct):
    tokens: int
    cached: int


class _Copied(msgspec.Struct):
    room: int


class Reader:
    """The decode engine that came to a room."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def give(self, tokens: int, cached: int) -> None:
        """Say that the prompt is computed and wait until it is copied. Raises :class:`TransferError`.

        ``cached``: tokens of it that were in the cache, which the decode engine tells as if they had been in its own.
        """
        try:
            self._writer.write(msgspec.json.encode(_Here(tokens, cached)) + b"\n")
            await self._writer.drain()
            msgspec.json.decode(await self._reader.readline(), type=_Copied)
        except (OSError, ValueError) as error:
            raise TransferError("the decode engine is gone") from error

    def close(self) -> None:
        """Tell it that nothing more comes."""
        self._writer.close()


class Pairing:
    """The rooms of one engine."""

    def __init__(self, config: Side, cost: Cost) -> None:
        self.config, self._cost = config, cost
        self._readers: dict[int, asyncio.Future[Reader]] = {}
        self._taken: set[int] = set()

    @contextlib.asynccontextmanager
    async def prefilling(self, room: int) -> AsyncIterator[Reader]:
        """Wait for the decode engine of a room; it is told when the block ends. Raises :class:`TransferError`."""
        if room in self._taken:
            raise TransferError(f"room {room} is another request's")
        self._taken.add(room)
        reader: Reader | None = None
        try:
            async with asyncio.timeout(self.config.bootstrap_seconds):
                reader = await self._came(room)
            yield reader
        except TimeoutError as error:
            raise TransferError(f"nobody came to room {room}") from error
        finally:
            self._taken.discard(room)
            self._readers.pop(room, None)
            if reader is not None:
                reader.close()

    async def take(self, at: Place) -> tuple[int, int]:
        """Fetch a prompt's blocks from a room's prefill engine. Raises :class:`TransferError`.

        Returns its tokens, and how many of them that engine had in its cache.
        """
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(at.host, at.port)
            with contextlib.closing(writer):
                writer.write(msgspec.json.encode(_Knock(at.room)) + b"\n")
                async with asyncio.timeout(self.config.waiting_seconds):
                    here = msgspec.json.decode(await reader.readline(), type=_Here)
                await asyncio.sleep(here.tokens * self._cost.kv / self._cost.speed)
                writer.write(msgspec.json.encode(_Copied(at.room)) + b"\n")
                await writer.drain()
                return here.tokens, here.cached
        except (OSError, ValueError, TimeoutError) as error:
            raise TransferError(f"room {at.room} at {at.host}:{at.port}: {error or type(error).__name__}") from error

    async def serve(self) -> None:
        """Answer decode engines until cancelled. Raises ``OSError`` when the address is taken."""
        if self.config.mode != "prefill":
            return
        server = await asyncio.start_server(self._knocked, *self.config.address)
        async with server:
            await server.serve_forever()

    async def _knocked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            room = msgspec.json.decode(await reader.readline(), type=_Knock).room
        except (ConnectionError, ValueError):
            writer.close()
            return
        came = self._came(room)
        if came.done():
            writer.close()
        else:
            came.set_result(Reader(reader, writer))
            asyncio.get_running_loop().call_later(self.config.bootstrap_seconds, self._forget, room, came)

    def _forget(self, room: int, came: "asyncio.Future[Reader]") -> None:
        """Send away who came to a room in which nobody prefills."""
        if room not in self._taken and self._readers.get(room) is came:
            self._readers.pop(room).result().close()

    def _came(self, room: int) -> "asyncio.Future[Reader]":
        return self._readers.setdefault(room, asyncio.get_running_loop().create_future())
