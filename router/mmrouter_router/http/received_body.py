"""The bytes of a request's body while they arrive, and one buffer of them at the end."""

import asyncio
import ctypes
from typing import Final

PIECE: Final = 1 << 20
"""Bytes of a piece from which the next one begins, and about what one turn of the event loop copies."""

allocate = ctypes.pythonapi.PyByteArray_FromStringAndSize
"""``allocate(None, length)``: a bytearray that is not filled with zeros, which takes 10 ms for 64 MiB."""
allocate.argtypes, allocate.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object


class ReceivedBody:
    """A body that arrives in pieces of any size.

    Small pieces are gathered, because an object for each of them takes far more memory than their bytes.
    """

    def __init__(self) -> None:
        self.size = 0
        self.pieces: list[bytes | bytearray] = []

    def add(self, piece: bytes) -> None:
        last = self.pieces[-1] if self.pieces else b""
        if isinstance(last, bytearray) and len(last) < PIECE:
            last += piece
        else:
            self.pieces.append(bytearray(piece) if self.pieces else piece)
        self.size += len(piece)

    async def whole(self) -> bytes | bytearray:
        """Return all bytes and keep none. Joining 64 MiB in one turn of the loop would stop it for 40 ms."""
        pieces, self.pieces = self.pieces, []
        if len(pieces) == 1:
            return pieces[0]
        if sum(map(len, pieces)) <= PIECE:
            return b"".join(pieces)
        body: bytearray = allocate(None, sum(map(len, pieces)))
        view, at = memoryview(body), 0
        pieces.reverse()
        while pieces:
            piece = pieces.pop()  # its memory is free before the next one's place is first written
            view[at : at + len(piece)] = piece
            at += len(piece)
            await asyncio.sleep(0)
        return body
