"""Authentication by API keys, and the cache salt of each tenant, so that tenants never share blocks.

A folder (a mounted Secret) holds one file per tenant, named after it, with one key per line; blank lines and ``#``
comments are skipped. Without the folder there is one tenant, no authentication and no salt. Salts derive from the
deployment's identity key and the tenant's name: all replicas agree on them and no client can guess one.
"""

import asyncio
import errno
import hashlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from blake3 import blake3

from mmrouter_router.core.errors import RequestError

log = logging.getLogger("mmrouter.tenants")

SALT_SCHEME = "t1"
CHECK_SECONDS = 1.0  # interval at which the folder is checked for changes
MAX_FILE_BYTES = 1024 * 1024
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO))

Signature = tuple[tuple[str, int, int, int], ...]
"""Name, inode, change time and size of what shows a change. A file's change time is that of its rights too, and cannot
be set, unlike its modification time."""
MOUNTED: Final = "..data"  # a link in a mounted Secret, which is replaced when any entry changes
_UNREAD: Signature = (("", 0, 0, 0),)  # of a folder that has never been read


class Tenant(NamedTuple):
    """A tenant and the salt that keeps its blocks apart (``None``: the single default tenant)."""

    name: str
    salt: str | None


DEFAULT = Tenant("", None)


class Tenants:
    """The keys of a folder. ``required``: the resource demands authentication. Run :meth:`follow` to see changes.

    Authentication is never switched off again: a folder that vanishes, or is missing, leaves no valid key.
    """

    def __init__(self, folder: Path, identity_key: bytes, *, required: bool = False) -> None:
        self._folder, self._identity_key = folder, identity_key
        self.authenticating = required
        self._keys: dict[bytes, Tenant] = {}
        self.problems: tuple[str, ...] = ()  # problems of the folder, for logs and conditions; contains no key
        self._signature: Signature | None = _UNREAD
        self.refresh()

    async def follow(self) -> None:
        """Follow changes of the folder in a thread, because a thousand files take longer than other requests wait."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await asyncio.to_thread(self.refresh)

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant:
        """Return the tenant by the ``Authorization`` header, else by ``x-api-key`` (names in lower case).

        Raises :class:`RequestError`: 401, or 503 where the keys could not be read yet.
        """
        if self._signature is _UNREAD:
            raise RequestError.keys_unreadable()
        if not self.authenticating:
            return DEFAULT
        given = list(headers)
        values = [value for name, value in given if name == b"authorization"]
        # Anthropic's clients send the bare key in a header of its own.
        values = values or [b"Bearer " + value for name, value in given if name == b"x-api-key"]
        if not values:
            raise RequestError.unauthorized("No API key provided: send 'Authorization: Bearer <key>'.")
        scheme, _, key = values[0].strip().partition(b" ")
        if len(values) > 1 or scheme.lower() != b"bearer":
            raise RequestError.unauthorized("The 'Authorization' header must be one 'Bearer <key>'.")
        # Lookup by hash: its time discloses nothing about a key.
        tenant = self._keys.get(_digest(key.strip()))
        if tenant is None:
            raise RequestError.unauthorized()
        return tenant

    def salt(self, tenant: str) -> str:
        hasher = blake3(key=self._identity_key)
        hasher.update(b"tenant salt:" + tenant.encode())
        return f"{SALT_SCHEME}-{hasher.hexdigest()}"

    def refresh(self) -> None:
        """Read the folder where it has changed. Where the process lacks files or memory the keys stay as they are."""
        try:
            signature = _signature(self._folder)
            if signature != self._signature:
                self._load(signature)
                self._signature = signature
        except OSError as error:
            log.warning("API keys cannot be read, will retry: %s", error.strerror)

    def _load(self, signature: Signature | None) -> None:
        if signature is None:
            self._keys = {}
            self._report([f"{self._folder.name}: the folder is missing"] if self.authenticating else [])
            return
        problems: list[str] = []
        owners: dict[bytes, set[str]] = {}
        for name in sorted(_names(self._folder)) if signature else ():
            keys = _read(self._folder / name, problems)
            if not keys:
                problems.append(f"{name}: no key")
            for key in keys:
                owners.setdefault(_digest(key), set()).add(name)
        # A shared key does not identify a tenant, so it is refused.
        shared = sorted(", ".join(sorted(names)) for names in owners.values() if len(names) > 1)
        problems += [f"{names}: these tenants share a key, which is refused" for names in shared]
        self._keys = {digest: Tenant(name, self.salt(name)) for digest, (name, *more) in owners.items() if not more}
        self.authenticating = True  # set after the keys, because requests are answered at the same time
        self._report(problems)

    def _report(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        for problem in problems:
            log.warning("API keys: %s", problem)


def _signature(folder: Path) -> Signature | None:
    """Return the folder's signature, ``None`` if it is missing: of a mounted Secret's link, else of every file.

    Raises ``OSError`` where the process lacks a resource, which says nothing about the folder.
    """
    try:
        names = _names(folder) if not (folder / MOUNTED).is_symlink() else [MOUNTED]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _reraise_exhausted(error)
        log.warning("API keys: %s: %s", folder.name, error.strerror)
        return ()  # an unreadable folder leaves no valid key
    files_seen = []
    for name in sorted(names):
        try:
            status = (folder / name).stat()
        except OSError as error:
            _reraise_exhausted(error)
            continue  # it is being replaced; the next check sees the new one
        files_seen.append((name, status.st_ino, status.st_ctime_ns, status.st_size))
    return tuple(files_seen)


def _names(folder: Path) -> list[str]:
    """Return the tenants with a file. Skips dot files, which mounted Secrets contain. Raises ``OSError``."""
    return [name for name in os.listdir(folder) if not name.startswith(".")]


def _reraise_exhausted(error: OSError) -> None:
    if error.errno in _EXHAUSTED:
        raise error


def _read(path: Path, problems: list[str]) -> set[bytes]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        _reraise_exhausted(error)
        problems.append(f"{path.name}: {error.strerror}")
        return set()
    if len(raw) > MAX_FILE_BYTES:
        problems.append(f"{path.name}: larger than {MAX_FILE_BYTES} bytes")
        return set()
    lines = (line.strip() for line in raw.splitlines())
    return {line for line in lines if line and not line.startswith(b"#")}


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
