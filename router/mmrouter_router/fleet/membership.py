"""Membership of a deployment (engine pods and other frontends), read from the file ``workers.json``.

Any source calls back with a :class:`Membership`. The file (docs/architecture.md) serves a router outside of a cluster
and is re-read on change; in a cluster :mod:`mmrouter_router.fleet.pod_watch` is the source.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mmrouter_router.fleet.workers import Member

log = logging.getLogger("mmrouter.discovery")

POLL_SECONDS = 0.1
"""Interval of the file's ``stat``; it bounds how long a dead worker is still a candidate."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another frontend of the same deployment."""

    uid: str
    name: str
    ip: str


@dataclass(frozen=True, slots=True)
class Membership:
    """All engine pods and other frontends at one moment. ``leaving``: this router's own pod is being deleted."""

    members: tuple[Member, ...]
    peers: tuple[Peer, ...] = ()
    leaving: bool = False


class _File(msgspec.Struct):
    workers: tuple[Member, ...]
    frontends: tuple[Peer, ...] = ()


def parse(raw: bytes) -> Membership:
    """Parse the file's text. Raises ``ValueError`` that names the field."""
    try:
        file = msgspec.json.decode(raw, type=_File)
    except msgspec.DecodeError as error:
        raise ValueError(f"workers.json: {error}") from error
    return Membership(file.workers, file.frontends)


async def watch_file(path: Path, update: Callable[[Membership], None]) -> None:
    """Call ``update`` with the file's content now and after every change; ends only by cancellation.

    A missing or malformed file keeps the last good membership, so a half-written file drops no worker.
    """
    last: tuple[int, int] | None = None
    while True:
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != last:
                membership = parse(path.read_bytes())
                last = stamp
                update(membership)
        except FileNotFoundError:
            pass
        except ValueError as error:
            log.warning("%s", error)
        await asyncio.sleep(POLL_SECONDS)
