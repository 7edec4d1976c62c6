"""The processes of containers, where the nodes run on this machine: found by container id, killed by number."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GONE_SECONDS = 10.0


@dataclass(frozen=True)
class Process:
    """The first process of a container that ran when this was made."""

    pid: int
    container: str

    def ours(self) -> bool:
        """Whether this user may signal it: on kind, a node's processes are seen and belong to root."""
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            return False
        return True

    def kill(self) -> float:
        """Kill it with -9 and wait until it is gone; return when, in seconds since 1970."""
        handle = os.pidfd_open(self.pid)
        try:
            assert _is_in(self.pid, self.container), "the number is another process's by now"
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            gone, _, _ = select.select([handle], [], [], GONE_SECONDS)
        finally:
            os.close(handle)
        assert gone, f"process {self.pid} does not end"
        return time.time()

    def started(self) -> float:
        """Return when it began, in seconds since 1970."""
        ticks = int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age


def process(pod: dict[str, Any], container: str) -> Process | None:
    """Return the first process of a pod's container, ``None`` where none is seen from here."""
    identifier = container_id(pod, container)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if identifier and _is_in(int(folder.name), identifier):
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                if status["NSpid"].split()[-1] == "1":
                    return Process(int(folder.name), identifier)
    return None


def process_here(pod: dict[str, Any], container: str) -> Process:
    """Return the first process of a pod's container. Where it is not seen or not ours to kill, the test is skipped."""
    found = process(pod, container)
    if found is None or not found.ours():
        pytest.skip("not run: needs the node's processes")
    return found


def _is_in(pid: int, container: str) -> bool:
    return container in Path(f"/proc/{pid}/cgroup").read_text()


def status_of(pod: dict[str, Any], container: str) -> dict[str, Any]:
    """Return the status of one of a pod's containers."""
    return next(each for each in statuses(pod) if each["name"] == container)


def statuses(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the status of each container of a pod, sidecars first."""
    yield from pod["status"].get("initContainerStatuses") or []
    yield from pod["status"].get("containerStatuses") or []


def container_id(pod: dict[str, Any], container: str) -> str:
    """Return the id that the runtime gave a container, empty while there is none."""
    return str(status_of(pod, container).get("containerID", "")).rpartition("//")[2]
