"""Connect prefill and decode engines of SGLang in rooms at the prefill engine's bootstrap port.

Both wait for each other (docs/engine-facts/sglang.md#prefill-decode): a prefill engine computes nothing before the
decode engine of the room has connected, and answers once that engine has the blocks. The transfer protocol is the
simulator's own, because only the two engines see a real one: a line with the room, one with the number of tokens, and
one that confirms the copy.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import Literal

import msgspec

from mmrouter_sim.core.step_cost import Cost
from mmrouter_sim.vllm.transfers import Ready, TransferError, fetch, line

HOST_HEADER, PORT_HEADER, ROOM_HEADER = (f"x-override-bootstrap-{name}" for name in ("host", "port", "room"))
RANK_HEADER = "x-override-routed-dp-rank"
WAIT_SECONDS = 300
"""How long an engine waits for its peer (``SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT``, ``.._WAITING_TIMEOUT``)."""


class PairSide(msgspec.Struct, frozen=True):
    """The role of an engine in pairs. ``address``: where a prefill engine's bootstrap server listens."""

    mode: Literal["prefill", "decode"]
    address: tuple[str, int]
    bootstrap_seconds: float = WAIT_SECONDS
    waiting_seconds: float = WAIT_SECONDS


def side(mode: str, host: str, port: int) -> PairSide | None:
    """Return the role from flags and environment; ``None``: not disaggregated. Raises ``ValueError``."""
    if mode == "null":
        return None
    variables = (f"SGLANG_DISAGGREGATION_{name}_TIMEOUT" for name in ("BOOTSTRAP", "WAITING"))
    seconds = (float(os.environ.get(variable, WAIT_SECONDS)) for variable in variables)
    return PairSide("prefill" if mode == "prefill" else "decode", (host, port), *seconds)


class RoomAddress(msgspec.Struct, frozen=True):
    """Bootstrap address and room of one request."""

    host: str
    port: int
    room: int


def place(headers: Mapping[str, str]) -> RoomAddress | None:
    """Return the room of a request's headers, or ``None``. Raises ``ValueError`` as the engine does."""
    room = headers.get(ROOM_HEADER)
    if room is None:
        return None
    return RoomAddress(headers.get(HOST_HEADER, ""), int(headers.get(PORT_HEADER, "8998")), int(room))


class _Room(msgspec.Struct):
    """A line of a decode engine: its room, and that again once it has copied the blocks."""

    room: int


class RoomReader:
    """Connection to the decode engine of a room."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    async def give(self, tokens: int, cached: int) -> None:
        """Announce the computed prompt and wait until it is copied. Raises :class:`TransferError`. ``cached``: tokens
        of it that were in the cache, which the decode engine tells as if they had been in its own.
        """
        try:
            self._writer.write(line(Ready(tokens, cached)))
            await self._writer.drain()
            msgspec.json.decode(await self.reader.readline(), type=_Room)
        except (OSError, ValueError) as error:
            raise TransferError("the decode engine is gone") from error

    def close(self) -> None:
        self._writer.close()


class PairRooms:
    """The rooms of one engine."""

    def __init__(self, config: PairSide, cost: Cost) -> None:
        self.config, self._cost = config, cost
        self.readers: dict[int, asyncio.Future[RoomReader]] = {}
        self._taken: set[int] = set()

    @contextlib.asynccontextmanager
    async def prefilling(self, room: int) -> AsyncIterator[RoomReader]:
        """Wait for the decode engine of a room; close it after the block. Raises :class:`TransferError`."""
        if room in self._taken:
            raise TransferError(f"room {room} is in use by another request")
        self._taken.add(room)
        reader: RoomReader | None = None
        try:
            async with asyncio.timeout(self.config.bootstrap_seconds):
                reader = await self._reader_of(room)
            yield reader
        except TimeoutError as error:
            raise TransferError(f"no decode engine connected to room {room}") from error
        finally:
            self._taken.discard(room)
            self.readers.pop(room, None)
            if reader is not None:
                reader.close()

    async def take(self, at: RoomAddress) -> tuple[int, int]:
        """Fetch a prompt's blocks from a room's prefill engine. Raises :class:`TransferError`. Returns its tokens, and
        how many of them that engine had in its cache.
        """
        room, seconds = _Room(at.room), self._cost.kv_seconds / self._cost.speed
        ready = await fetch(at.host, at.port, room, room, seconds, self.config.waiting_seconds)
        return ready.tokens, ready.cached

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            room = msgspec.json.decode(await reader.readline(), type=_Room).room
        except (ConnectionError, ValueError):
            writer.close()
            return
        reader_future = self._reader_of(room)
        if reader_future.done():
            writer.close()
        else:
            reader_future.set_result(RoomReader(reader, writer))
            asyncio.get_running_loop().call_later(self.config.bootstrap_seconds, self._forget, room, reader_future)

    def _forget(self, room: int, reader_future: "asyncio.Future[RoomReader]") -> None:
        """Close the connection of a room without a prefill request."""
        if room not in self._taken and self.readers.get(room) is reader_future:
            self.readers.pop(room).result().close()

    def _reader_of(self, room: int) -> "asyncio.Future[RoomReader]":
        return self.readers.setdefault(room, asyncio.get_running_loop().create_future())
