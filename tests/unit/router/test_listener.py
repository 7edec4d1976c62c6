"""Who connects is taken: all that come together at once, and those in the system's queue when the end comes."""

import asyncio
import itertools
import os
import resource
import socket
from contextlib import closing, contextmanager

import pytest
import uvloop
from uvicorn.config import STARTUP_FAILURE

from mmrouter_router.http import listener
from mmrouter_router.http.listener import BATCH, Listener
from mmrouter_router.http.server import Server

PORT = 8000
FEW = 6
"""Turns: to make what was taken a connection, and what the loop has to do beside."""
CROWD = 8 * BATCH
_hosts = itertools.count(1)


class Greeter(asyncio.Protocol):
    """Says hello."""

    def __init__(self, begun: list["Greeter"]) -> None:
        self._begun = begun

    def connection_made(self, transport) -> None:
        self._begun.append(self)
        transport.write(b"hello")
        transport.close()


class Rig:
    """A listener in the loop that a router runs in. Clients connect without the loop: the system accepts them."""

    def __init__(self, host: str = "", port: int = PORT) -> None:
        self.host = host or f"127.84.{os.getpid() % 250}.{next(_hosts)}"
        self.port = port
        self.begun: list[Greeter] = []
        self.listener = Listener(lambda: Greeter(self.begun), self.host, port, 2048)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=10)

    async def turns_until(self, count: int, most: int) -> int:
        """Return after how many turns of the loop so many connections have begun, at the most ``most``."""
        for turn in range(most):
            if len(self.begun) >= count:
                return turn
            await asyncio.sleep(0)
        return most

    async def heard(self, client: socket.socket) -> bytes:
        return await asyncio.to_thread(client.recv, 100)


@contextmanager
def no_more_files():
    """Let this process open nothing."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as free:
        number = free.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_burst_of_connections_is_accepted_in_few_turns_of_the_loop():
    async def run() -> None:
        rig = Rig()
        clients = [rig.connect() for _ in range(CROWD)]
        assert await rig.turns_until(CROWD, most=CROWD) <= CROWD / BATCH + FEW
        assert {await rig.heard(client) for client in clients} == {b"hello"}
        for client in clients:
            client.close()
        rig.listener.close()

    uvloop.run(run())


def test_burst_is_accepted_in_batches():
    async def run() -> None:
        rig = Rig()
        clients = [rig.connect() for _ in range(CROWD)]
        while not rig.begun:
            await asyncio.sleep(0)
        assert len(rig.begun) <= BATCH
        assert await rig.turns_until(CROWD, most=CROWD) <= CROWD / BATCH + FEW
        for client in clients:
            client.close()
        rig.listener.close()

    uvloop.run(run())


def test_close_accepts_connections_in_the_kernels_queue():
    async def run() -> None:
        rig = Rig()
        clients = [rig.connect() for _ in range(CROWD)]
        rig.listener.close()
        rig.listener.close()
        await rig.listener.wait_closed()
        assert len(rig.begun) == len(clients)
        for client in clients:
            with closing(client):
                assert await rig.heard(client) == b"hello"
        with pytest.raises(ConnectionRefusedError):
            rig.connect()

    uvloop.run(run())


def test_exhausted_file_descriptors_delay_connections(monkeypatch):
    monkeypatch.setattr(listener, "RETRY_SECONDS", 0.02)

    async def run() -> None:
        rig = Rig()
        with closing(rig.connect()) as client:
            with no_more_files():
                assert await rig.turns_until(1, most=20) == 20
            assert await rig.heard(client) == b"hello"
        rig.listener.close()

    uvloop.run(run())


def test_listener_can_close_while_file_descriptors_are_exhausted():
    async def run() -> None:
        rig = Rig()
        with closing(rig.connect()) as client:
            with no_more_files():
                await rig.turns_until(1, most=20)
            rig.listener.close()
            assert await rig.heard(client) == b"hello"

    uvloop.run(run())


def test_listens_on_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            port = probe.getsockname()[1]
    except OSError as error:  # compiled in, and switched off in many a container
        pytest.skip(f"not run: no loopback of IPv6: {error}")

    async def run() -> None:
        rig = Rig("::1", port)
        with closing(rig.connect()) as client:
            assert await rig.heard(client) == b"hello"
        rig.listener.close()

    uvloop.run(run())


async def test_server_with_address_in_use_exits_with_uvicorns_status(caplog):
    async def nobody(scope, receive, send) -> None:
        raise AssertionError("nobody can ask")

    with socket.create_server((f"127.84.{os.getpid() % 250}.{next(_hosts)}", PORT)) as taken:
        server = Server(nobody, taken.getsockname()[0], PORT, drain_seconds=1)
        with pytest.raises(SystemExit) as ended:
            await server.serve()
    assert ended.value.code == STARTUP_FAILURE
    assert "cannot listen on" in caplog.text
