"""Who the workers and the other frontends are. A small port: anything that calls ``Roster`` with the present members.

Here: the file ``workers.json`` (docs/architecture.md), re-read on change. Its text is the truth, so a member that is no
longer in it has left.
In a cluster: :mod:`mmrouter_router.fleet.pod_watch`.
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
"""How often the file's status is looked at (one ``stat``): a dead worker must not be offered requests for long."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another frontend of the same deployment."""

    uid: str
    name: str
    ip: str


@dataclass(frozen=True, slots=True)
class Roster:
    """Everybody, at one moment."""

    members: tuple[Member, ...]
    peers: tuple[Peer, ...] = ()
    leaving: bool = False
    """This router's own pod is being deleted."""


class _Worker(msgspec.Struct):
    uid: str
    name: str
    ip: str
    pool: str
    role: str
    node: str = ""
    ready: bool = True
    draining: bool = False
    compatibility: str = ""


class _Frontend(msgspec.Struct):
    uid: str
    name: str
    ip: str


class _File(msgspec.Struct):
    workers: list[_Worker]
    frontends: list[_Frontend] = []


def parse(raw: bytes) -> Roster:
    """Read the file's text. Raises ``ValueError`` that names the field."""
    try:
        file = msgspec.json.decode(raw, type=_File)
    except msgspec.DecodeError as error:
        raise ValueError(f"workers.json: {error}") from error
    return Roster(
        tuple(
            Member(w.uid, w.name, w.ip, w.pool, w.role, w.node, w.ready, w.draining, w.compatibility)
            for w in file.workers
        ),
        tuple(Peer(f.uid, f.name, f.ip) for f in file.frontends),
    )


async def watch_file(path: Path, update: Callable[[Roster], None]) -> None:
    """Call ``update`` with the file's content now and after every change; ends only by cancellation.

    A file that is missing or malformed for a moment keeps the last good roster: nobody is dropped by accident.
    """
    seen: tuple[int, int] | None = None
    while True:
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != seen:
                roster = parse(path.read_bytes())
                seen = stamp
                update(roster)
        except FileNotFoundError:
            pass
        except ValueError as error:
            log.warning("%s", error)
        await asyncio.sleep(POLL_SECONDS)
