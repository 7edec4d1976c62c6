"""The control groups of a one-node cluster: all of its pods are below one, by which they are ended.

Of version 1, one hierarchy per controller, or of version 2, one for all.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

KILL_SECONDS = 10.0
_CPUSET = ("cpuset.cpus", "cpuset.mems")
# All pods together would have the processor's time of one process of this machine, however many run beside them.
_WEIGHT = {"cpu.shares": 16384, "cpu.weight": 1600}
_PER_NICE = 1.25
"""What a step of niceness is to the kernel. Pods are as nice as who makes them: niceness does not reach over groups."""


def hierarchies() -> list[Path]:
    """Return where the hierarchies are mounted; runtimes make groups in those without controllers, too."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] in {"cgroup", "cgroup2"}:
            found.append(Path(before.split()[4]))
    return found


def make_group(name: str) -> None:
    """Make a group in every hierarchy. Raises ``OSError``."""
    for root in hierarchies():
        group = root / name
        group.mkdir(exist_ok=True)
        for setting in _CPUSET:  # a new set of version 1 is empty, and takes no process
            if (group / setting).is_file() and not (group / setting).read_text().strip():
                (group / setting).write_text((root / setting).read_text())
        for setting, weight in _WEIGHT.items():
            if (group / setting).is_file():
                (group / setting).write_text(str(round(weight / _PER_NICE ** os.nice(0))))


def remove_group(name: str) -> None:
    """Kill what is in a group, below it too, and remove it everywhere. One that is not there is no error."""
    groups = [root / name for root in hierarchies()]
    deadline = time.monotonic() + KILL_SECONDS
    while (pids := {pid for group in groups for pid in members(group)}) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for group in groups:
        for folder, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def members(group: Path) -> Iterator[int]:
    """Return the processes of a group and of those below it."""
    for folder, _, files in os.walk(group):
        if "cgroup.procs" in files:
            with contextlib.suppress(OSError):  # the group is just going
                yield from map(int, Path(folder, "cgroup.procs").read_text().split())
