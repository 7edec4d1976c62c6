"""Connections that have ended are gone at once: no cycle waits for the collector, which stops everything to find it."""

import asyncio
import gc
import itertools
import os
import weakref
from contextlib import contextmanager

import pytest
import uvloop
from unit.router.engine import Engine

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.http.server import Server
from mmrouter_router.http.upstream import Upstream

PORT = 8000
_hosts = itertools.count(1)


@contextmanager
def no_collector():
    """Let only what nobody refers to go."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def until(over) -> None:
    async with asyncio.timeout(10):
        while not over():
            await asyncio.sleep(0.005)


async def cold(scope, receive, send) -> None:
    """Answer by ASGI."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


async def hot(client) -> None:
    try:
        await client.body(1024, lambda size: None)
    except asyncio.CancelledError:  # the client has left
        return
    await client.respond(200, [(b"content-length", b"2")], b"hi")


cold.hot = {b"/hot": hot}


@pytest.mark.parametrize("path", [b"/hot", b"/cold"])
@pytest.mark.parametrize("leaves", ["at its end", "within a body"])
def test_client_connection_is_freed_without_garbage_collection(path, leaves):
    async def run() -> None:
        server = Server(cold, f"127.85.{os.getpid() % 250}.{next(_hosts)}", PORT, drain_seconds=1)
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        with no_collector():
            reader, writer = await asyncio.open_connection(server.config.host, PORT)
            for _ in range(2):
                writer.write(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nab" % path)
                await reader.readuntil(b"hi")
            if leaves == "within a body":
                writer.write(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\na" % path)
                await until(lambda: server.server_state.tasks)
            (connection,) = (weakref.ref(each) for each in server.server_state.connections)
            writer.close()
            await until(lambda: not server.server_state.connections and not server.server_state.tasks)
            await until(lambda: connection() is None)
        server.should_exit = True
        await serving

    uvloop.run(run())


def test_engine_connection_is_freed_without_garbage_collection():
    async def run() -> None:
        async with Engine() as engine:
            upstream = Upstream()
            with no_collector():
                reply = await upstream.request(engine.ip, HTTP_PORT, "POST", "/", {"authorization": "none"})
                while await reply.piece():
                    pass
                connection = weakref.ref(reply.connection)
                reply.close()
                del reply
                upstream.close()
                await until(lambda: connection() is None)

    uvloop.run(run())
