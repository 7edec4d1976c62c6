"""A process that outlives a local run just long enough to clean up after it, however the run ended.

Reads lines from its standard input: ``+GROUP`` and ``-GROUP`` (process groups that began and ended), ``/PATH`` (a
folder of the run). At the end of its input, which the kernel brings about even when the run was killed, it kills the
groups, then every process that carries the run's mark in its environment (one that left its group), and removes the
folders, what held them where nothing else is in it, and the shared memory of the dead.

Run as a script, with nothing but the standard library: ``guard.py MARK``. The run itself uses the functions on
processes and shared memory.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable

ROUNDS = 20
SHM = "/dev/shm/"  # noqa: S108 - where POSIX shared memory lies


def main() -> None:
    """Wait for the end of the input, then clean up."""
    mark = sys.argv[1].encode()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    began = time.time()
    groups: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        text = line.rstrip("\n")
        if text.startswith("+"):
            groups.add(int(text[1:]))
        elif text.startswith("-"):
            groups.discard(int(text[1:]))
        else:
            folders.append(text)
    memory: set[str] = set()
    for _ in range(ROUNDS):  # one that was just being born is seen in the next round
        left = [pid for pid in processes() if _member(pid, groups) or _marked(pid, mark)]
        memory |= shared_memory(left, began)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(0.05)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other runs are in it
            os.rmdir(os.path.dirname(folder))
    remove_unused(memory)


def processes() -> list[int]:
    """Return all processes but this one."""
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    return [int(name) for name in names if name.isdigit() and int(name) != os.getpid()]


def members(group: int) -> list[int]:
    """Return the living processes of a group."""
    return [pid for pid in processes() if _member(pid, {group})]


def shared_memory(pids: Iterable[int], since: float) -> set[str]:
    """Return the shared memory objects that processes have mapped and that were made after ``since`` (seconds, 1970).

    A pod's shared memory is its own and ends with it; here it is the machine's, and a killed process leaves it behind.
    """
    found = set()
    for path in {path for pid in pids for path in _mapped(pid)}:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if status.st_uid == os.getuid() and status.st_mtime >= since:
                found.add(path)
    return found


def remove_unused(objects: Iterable[str]) -> None:
    """Remove shared memory objects that no living process has mapped."""
    wanted = set(objects)
    if not wanted:
        return
    for path in wanted - {path for pid in processes() for path in _mapped(pid)}:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _mapped(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            path = line.rstrip("\n").partition(SHM)[2]
            # Only what lies in the root: folders there belong to somebody who removes them.
            if path and "/" not in path and not path.endswith(" (deleted)"):
                found.add(SHM + path)
    return found


def _member(pid: int, groups: set[int]) -> bool:
    # The system call first: it is cheap, and almost every process of a machine is somebody else's.
    with contextlib.suppress(OSError):
        if os.getpgid(pid) in groups:
            with open(f"/proc/{pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] != b"Z"
    return False


def _marked(pid: int, mark: bytes) -> bool:
    # One that has ended and that nobody has waited for has no environment.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return mark in file.read().split(b"\0")
    return False


if __name__ == "__main__":
    main()
