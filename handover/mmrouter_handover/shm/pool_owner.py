"""The file by which a pool says whose it is. Its exclusive lock is held for as long as the writer lives."""

import os
import re
import secrets

import msgspec

from mmrouter_handover.shm import files

MAX_BYTES = 4096
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class Owner(msgspec.Struct, frozen=True):
    """Who writes a pool. ``since``: seconds on the node's CLOCK_BOOTTIME; ``pid`` as the writer itself sees it."""

    writer: str
    pid: int
    since: float
    limit_bytes: int


NOBODY = Owner("", 0, 0.0, 0)
_decoder = msgspec.json.Decoder(Owner)


def folder_name(writer: str) -> str:
    """Return a name that no other folder has: what of ``writer`` a name may hold, and something drawn."""
    return f"{files.POOL_PREFIX}{_NOT_A_NAME.sub('_', writer)[:100]}-{secrets.token_hex(8)}"


def create(root: int, name: str, owner: Owner) -> tuple[int, int]:
    """Make a pool's folder with its owner file, locked; return both open. Raises ``OSError``.

    The root is locked meanwhile, so that no janitor takes a pool that is being made for one whose owner is dead.
    """
    files.lock_waiting(root, exclusive=False)
    try:
        os.mkdir(name, files.FOLDER_MODE, dir_fd=root)
        folder = os.open(name, files.FOLDER, dir_fd=root)
        try:
            os.fchmod(folder, files.FOLDER_MODE)
            number = files.create_file(files.OWNER, folder)
            files.lock_waiting(number, exclusive=True)
            os.write(number, msgspec.json.encode(owner))
        except OSError:
            os.close(folder)
            raise
    finally:
        files.unlock(root)
    return folder, number


def read(folder: int) -> tuple[Owner, bool]:
    """Return what a pool's owner file says, and whether its owner lives. An unreadable file belongs to nobody known."""
    try:
        number = files.open_file(files.OWNER, folder)
    except OSError:
        return NOBODY, False
    try:
        # A shared lock: two that look do not take each other for an owner.
        lives = not files.lock(number, exclusive=False)
        return _decode(os.pread(number, MAX_BYTES, 0)), lives
    finally:
        os.close(number)


def _decode(raw: bytes) -> Owner:
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeError):
        return NOBODY
