"""A network, a small disk and a shared memory of this process's own, in which faults harm nothing else. Needs root."""

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

_NEW_NETWORK, _NEW_MOUNTS = 0x40000000, 0x00020000
DISK_MIB = 64
SHM = Path("/dev/shm")


def isolate() -> Path:
    """Move this process into namespaces of its own; return the folder of its small disk, which holds local runs.

    Call it before the first thread, which would stay where it is. Raises ``OSError`` without the rights, and
    ``subprocess.CalledProcessError`` where a tool refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK | _NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "namespaces cannot be made")
    disk = Path(tempfile.gettempdir()) / f"mmrouter-disk-{os.getpid()}"
    disk.mkdir(mode=0o700)
    for command in (
        ("mount", "--make-rprivate", "/"),
        ("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=0700", "tmpfs", str(disk)),
        ("mount", "-t", "tmpfs", "-o", "size=64m,mode=1777", "tmpfs", str(SHM)),
        ("ip", "link", "set", "lo", "up"),
    ):
        subprocess.run(command, check=True, capture_output=True)
    os.environ["XDG_RUNTIME_DIR"] = str(disk)
    return disk


def leave(disk: Path) -> None:
    """Free the disk; the namespaces end with the process."""
    subprocess.run(("umount", "--lazy", str(disk)), check=True, capture_output=True)
    disk.rmdir()
