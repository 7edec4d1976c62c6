"""A process that cleans up after a local run, however the run ended.

It reads lines from standard input: ``+GROUP`` and ``-GROUP`` (process groups that started and ended), ``/PATH`` (a
folder of the run). At the end of input, which also follows a kill of the run, it kills the groups and every process
with the run's mark in its environment (one that left its group), and removes the folders, their parents if empty, and
the shared memory of the killed processes.

Run as a script with only the standard library: ``cleanup_guard.py MARK``. The run itself uses the functions on
processes and shared memory.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Container, Iterable

ROUNDS = 20
SHM = "/dev/shm/"  # noqa: S108 - where POSIX shared memory lies


def main() -> None:
    """Wait for the end of the input, then clean up."""
    mark = sys.argv[1].encode()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    before = objects()
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
    for _ in range(ROUNDS):  # a process that is just starting is found in the next round
        left = [pid for pid in processes() if _member(pid, groups) or _marked(pid, mark)]
        memory |= shared_memory(left, before)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(0.05)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # in use by other runs
            os.rmdir(os.path.dirname(folder))
    remove_unused(memory)


def processes() -> list[int]:
    """Return all processes but this one."""
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    return [int(name) for name in names if name.isdigit() and int(name) != os.getpid()]


def members(group: int) -> list[int]:
    return [pid for pid in processes() if _member(pid, {group})]


def objects() -> frozenset[tuple[str, int]]:
    """Return path and inode of the machine's shared memory objects. Their times do not show which of them are new: the
    wall clock may be set."""
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        return frozenset((entry.path, entry.inode()) for entry in entries)
    return frozenset()


def shared_memory(pids: Iterable[int], before: Container[tuple[str, int]]) -> set[str]:
    """Return this user's shared memory objects that processes have mapped, without those of ``before``.

    A pod's shared memory ends with the pod; here it is the machine's, and a killed process leaves it behind.
    """
    new = set()
    for path in {path for pid in pids for path in _mapped(pid)}:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if status.st_uid == os.getuid() and (path, status.st_ino) not in before:
                new.add(path)
    return new


def remove_unused(paths: Iterable[str]) -> None:
    """Remove shared memory objects that no living process has mapped."""
    unused = set(paths)
    if not unused:
        return
    for path in unused - {path for pid in processes() for path in _mapped(pid)}:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _mapped(pid: int) -> set[str]:
    mapped = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            path = line.rstrip("\n").partition(SHM)[2]
            # Only objects in the root: folders there have owners that remove them.
            if path and "/" not in path and not path.endswith(" (deleted)"):
                mapped.add(SHM + path)
    return mapped


def _member(pid: int, groups: set[int]) -> bool:
    # The cheap system call first, because almost every process belongs to others.
    with contextlib.suppress(OSError):
        if os.getpgid(pid) in groups:
            with open(f"/proc/{pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] != b"Z"
    return False


def _marked(pid: int, mark: bytes) -> bool:
    # A zombie has no environment.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return mark in file.read().split(b"\0")
    return False


if __name__ == "__main__":
    main()
