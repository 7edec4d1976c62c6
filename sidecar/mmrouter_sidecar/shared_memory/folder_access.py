"""Give the group of the pods access to the node's shared tmpfs folder (``mmrouter shared-memory FOLDER GROUP``).

An init container runs it as root, once per pod, before the sidecar starts. It needs no capability, because it owns the
folder and belongs to the group.
"""

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

MODE = 0o2770  # only the group has access, and new files belong to it too (setgid)


class SharedFolderError(Exception):
    """The folder cannot be used; the message says why."""


def open_folder(folder: Path, group: int) -> None:
    """Set a folder's group and mode, unless it is accessible anyway. Raises :class:`SharedFolderError`."""
    try:
        # No links: a process that can write beside the folder must not redirect this one.
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise SharedFolderError(f"{folder}: {error.strerror}") from error
    try:
        status = os.fstat(number)
        if (status.st_gid, stat.S_IMODE(status.st_mode)) == (group, MODE):
            return
        try:
            os.fchown(number, -1, group)
            os.fchmod(number, MODE)
        except OSError as error:
            # Outside a cluster the folder belongs to the user of all processes.
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise SharedFolderError(f"{folder} cannot be given to group {group}: {error.strerror}") from error
    finally:
        os.close(number)


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 0 done, 1 unusable folder, 2 wrong usage; the last line has the reason."""
    try:
        folder, group = arguments
        open_folder(Path(folder), int(group))
    except ValueError:
        sys.stderr.write("usage: mmrouter shared-memory FOLDER GROUP\n")
        return 2
    except SharedFolderError as error:
        sys.stderr.write(f"mmrouter shared-memory: {error}\n")
        return 1
    return 0
