"""An engine's HTTP server on a loopback address of its own, for questions that the router asks by itself."""

import asyncio
import contextlib
import itertools
import json
import os

from mmrouter_lib.engines.base.launch import HTTP_PORT

_hosts = itertools.count(1)


class Engine:
    """Answers everything with one status; ``seen`` has path, body and authorization of each request.

    ``encodes``: a chat's answer says where the embeddings of its images are.
    """

    def __init__(self, status: int = 200, *, encodes: bool = False) -> None:
        self.encodes = encodes
        self.ip = f"127.80.{os.getpid() % 250}.{next(_hosts)}"
        self.status = status
        self.seen: list[tuple[str, dict, str]] = []

    async def __aenter__(self) -> "Engine":
        self._server = await asyncio.start_server(self._connection, self.ip, HTTP_PORT)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connection(self, reader, writer) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines if line)}
                raw = await reader.readexactly(int(headers["content-length"]))
                body = json.loads(raw or b"{}")
                self.seen.append((first.split()[1], body, headers["authorization"]))
                answer = json.dumps(_embeddings(body) if self.encodes else {}).encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (self.status, len(answer), answer))
                await writer.drain()


def _embeddings(body: dict) -> dict:
    parts = [part for message in body.get("messages", ()) for part in message["content"]]
    return {"ec_transfer_params": {part["uuid"]: {"item_indices": [0]} for part in parts}}
