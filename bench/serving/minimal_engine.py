"""A minimal engine process: answers chat requests at next to no cost, with fixed JSON or a stream of 64 tokens.

A request's ``seed`` is the pause between two tokens in milliseconds; without one the stream comes as fast as it can.
"""

import asyncio
import re
import sys
from collections.abc import Sequence
from typing import cast

import uvloop

TOKENS = 64
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)
_PAUSE = re.compile(rb'"seed":\s*(\d+)')
_LAST_CHUNK = b"0\r\n\r\n"
_TAIL = 4096
"""Bytes at the end of a body in which the load generator writes its options."""
_STREAM = re.compile(rb'"stream":\s*true')

_ANSWER = (
    b'{"id":"chatcmpl-bench","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"The quick brown fox jumps over the lazy dog."},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":64,"completion_tokens":10,"total_tokens":74}}'
)
_INFO = b'{"object":"list","data":[{"id":"bench","object":"model"}],"model_path":"bench","is_generation":true}'


def _plain(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _token(number: int) -> bytes:
    return _chunk(
        b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":"bench","choices":'
        b'[{"index":0,"delta":{"content":" token%02d"},"finish_reason":null}]}\n\n' % number
    )


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_PIECES = [_token(number) for number in range(TOKENS)]
_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class EngineConnection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._left, self._chunked = 0, False
        """Bytes that a request lacks; whether it ends with its last chunk instead."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)  # joined once, because a body of 10 MB comes in fifty pieces
        self._left -= len(data)
        if not b"".join(self._pieces[-2:]).endswith(_LAST_CHUNK) if self._chunked else self._left > 0:
            return
        whole = b"".join(self._pieces)
        self._pieces = [whole]
        head, blank_line, rest = whole.partition(b"\r\n\r\n")
        if not blank_line:
            return
        if _CHUNKED.search(head):  # how some routers forward a large body
            self._chunked = not rest.endswith(_LAST_CHUNK)
            if self._chunked:
                return
            length = len(rest)
        else:
            declared = _LENGTH.search(head)
            length = int(declared[1]) if declared else 0
            if len(rest) < length:
                self._left = length - len(rest)
                return
        self._pieces, self._left = [rest[length:]], 0
        self._answer(head, rest[max(0, length - _TAIL) : length])

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if not head.startswith(b"POST"):
            self._transport.write(_plain(_INFO))
        elif not _STREAM.search(body):
            self._transport.write(_plain(_ANSWER))
        else:
            pause = _PAUSE.search(body)
            self._transport.write(_HEAD)
            if pause:
                self._next(0, int(pause[1]) / 1000)
            else:
                self._transport.writelines([*_PIECES, _END])

    def _next(self, number: int, pause: float) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if number == TOKENS:
            self._transport.write(_END)
            return
        self._transport.write(_PIECES[number])
        asyncio.get_running_loop().call_later(pause, self._next, number + 1, pause)


async def main(port: int, hosts: Sequence[str]) -> None:
    """Serve one engine per address until killed; prints a line when the ports are open."""
    server = await asyncio.get_running_loop().create_server(EngineConnection, hosts, port)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2:]))
