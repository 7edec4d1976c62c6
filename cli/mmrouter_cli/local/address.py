"""Loopback addresses: a block 127.1.K.0/24 per run, so that several runs stand side by side with the same ports."""

import errno
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from mmrouter_cli.local.folders import LocalError

LOCK_PORT = 47_127
FIRST_POD = 2


@dataclass(slots=True)
class AddressBlock:
    """The addresses of one run: ``.1`` for Services, ``.2`` and up for pods.

    Held by a listening socket, so that the kernel gives the block back however the process ends.
    """

    number: int
    lock: socket.socket
    used: int = 0

    @property
    def service(self) -> str:
        return f"127.1.{self.number}.1"

    def next_pod(self) -> str:
        """Return the address of one more pod. Raises :class:`LocalError` when there is none left."""
        host = FIRST_POD + self.used
        if host > 253:
            raise LocalError("too many pods for one machine: 252 addresses are all there are")
        self.used += 1
        return f"127.1.{self.number}.{host}"

    def close(self) -> None:
        self.lock.close()


def take_block(ports: Iterable[int]) -> AddressBlock:
    """Take the first block that is free and on which ``ports`` can be bound. Raises :class:`LocalError`."""
    wanted = sorted(set(ports))
    problem = "every block is in use"
    for number in range(256):
        lock = _listen(f"127.1.{number}.254", LOCK_PORT)
        if lock is None:
            continue
        taken = next((port for port in wanted if not can_bind(f"127.1.{number}.{FIRST_POD}", port)), None)
        if taken is None:
            return AddressBlock(number, lock)
        lock.close()
        problem = f"port {taken} is taken by a process that listens on all addresses; stop it"
    raise LocalError(f"no free block of loopback addresses 127.1.K.0/24: {problem}")


def can_bind(host: str, port: int) -> bool:
    """Whether this process may listen there."""
    probe = _listen(host, port)
    if probe is None:
        return False
    probe.close()
    return True


def _listen(host: str, port: int) -> socket.socket | None:
    lock = socket.socket()
    try:
        lock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended run linger
        lock.bind((host, port))
        lock.listen(1)
    except OSError as error:
        lock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise LocalError(f"{host} cannot be bound: the whole of 127.0.0.0/8 must be local, as on Linux") from error
        return None
    return lock
