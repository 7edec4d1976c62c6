"""The folders of a local run: private to its user and removed when the run ends."""

import contextlib
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

SHM = Path("/dev/shm")  # noqa: S108 - the tmpfs itself; what lies below it belongs to one user and one run
NAME_LENGTH = 20
"""Longer names are cut: engines put unix sockets below these folders, whose whole path may have 107 characters."""


class LocalError(Exception):
    """The deployment cannot be run here; the message says why and what to do."""


def run_root() -> Path:
    """Return the parent of all local runs' folders of this user, each with a ``run.json``; it may not exist."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"mmrouter-{os.getuid()}"


def network_namespace() -> int:
    """Return the network namespace of this process, 0 where there are none. Each has loopback addresses of its own, so
    that runs in two of them may have the same endpoint.
    """
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/net").st_ino
    return 0


class RunFolders(NamedTuple):
    """The folder of one run, and its twin on tmpfs (the same one where there is no tmpfs)."""

    run: Path
    tmpfs: Path


def make_folders(name: str) -> RunFolders:
    """Create the folders of a run of this process, after removing those of runs whose process has ended.

    Raises :class:`LocalError` when the root belongs to another user.
    """
    run = _make(run_root(), name)
    return RunFolders(run, _make(SHM / f"mmrouter-{os.getuid()}", name) if os.access(SHM, os.W_OK) else run)


def _make(root: Path, name: str) -> Path:
    for number in itertools.count():  # one process may have several runs
        folder = root / f"{name[:NAME_LENGTH]}{f'.{number}' if number else ''}-{os.getpid()}"
        # Existing: another run of this process. Missing root: the last run in it is ending.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            _sweep(root)
            folder.mkdir(mode=0o700)
            return folder
    raise AssertionError("itertools.count never ends")


def _sweep(root: Path) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    # In a shared temporary folder another user may have created this name to read the secrets in it.
    if status.st_uid != os.getuid() or root.is_symlink() or status.st_mode & 0o077:
        raise LocalError(f"{root} is not a private folder of this user: remove it")
    for folder in root.iterdir():
        pid = folder.name.rpartition("-")[2]
        if not pid.isdigit():
            continue
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:
            pass  # it is another user's process
