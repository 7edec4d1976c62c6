"""A Docker daemon of its own, which changes nothing of this machine: own network namespace, socket and data.

Its containers reach the internet through slirp4netns, a network stack in a process, so that no rule, bridge or address
is added to the machine's own network. Needs root and Debian's ``docker.io`` and ``slirp4netns``.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hack.build_once import ROOT, CannotMakeError, FailedError, captured, failed

PACKAGES = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "slirp4netns": "slirp4netns",
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
"""Command -> its Debian package."""
START_SECONDS, STOP_SECONDS = 90, 60


@dataclass(frozen=True)
class Docker:
    """``enter``: what a command line begins with that runs in the daemon's network. ``socket``: the daemon's."""

    enter: tuple[str, ...]
    socket: Path

    @property
    def env(self) -> dict[str, str]:
        # Debian's client has BuildKit built in; a newer one on the path would look for its plugin.
        path = f"/usr/sbin:/usr/bin:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "DOCKER_HOST": f"unix://{self.socket}", "DOCKER_BUILDKIT": "1"}

    def run(self, *command: str | Path, **environment: str) -> str:
        """Run a command in the daemon's network; return what it prints. Raises :class:`FailedError`."""
        done = captured([*self.enter, *map(str, command)], env={**self.env, **environment})
        if done.returncode != 0:
            raise failed(" ".join(map(str, command[:3])), done)
        return done.stdout

    def attend(self, command: list[str], **environment: str) -> int:
        """Run a command in the daemon's network with this process's output; return its exit status. What interrupts
        this process interrupts the command, which gets time to clean up.
        """
        # In a session of its own ctrl-C reaches it once, through this process.
        process = subprocess.Popen(
            [*self.enter, *command], cwd=ROOT, env={**self.env, **environment}, start_new_session=True
        )
        try:
            return process.wait()
        except KeyboardInterrupt:
            stop(process, signal.SIGINT)
            raise


def require() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotMakeError("a Docker daemon of its own needs root on Linux")
    lacks = {package for command, package in PACKAGES.items() if shutil.which(command) is None}
    if lacks:
        raise CannotMakeError(f"a Docker daemon of its own needs Debian's {', '.join(sorted(lacks))}")


@contextmanager
def daemon(data: Path, run: Path) -> Iterator[Docker]:
    """Run a daemon until the block ends. ``data``: its images, which stay; ``run``: its socket and log. SIGTERM and
    SIGHUP end the block as ctrl-C does. Raises :class:`CannotMakeError`, :class:`FailedError`.
    """
    require()
    # SIGINT too: a shell starts background commands with it ignored, and children would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    name = f"mmrouter-docker-{os.getpid()}"
    docker = Docker(("nsenter", f"--net=/run/netns/{name}"), run / "docker.sock")
    folders = [f"--data-root={data}", f"--exec-root={run / 'exec'}", f"--pidfile={run / 'pid'}"]
    runtime = [
        f"--add-runtime=permitted={Path(__file__).with_name('permitted_runc.py')}",
        "--default-runtime=permitted",
    ]
    dockerd = ["dockerd", f"--host=unix://{docker.socket}", *folders, *runtime, "--storage-driver=overlay2"]
    network = [
        "slirp4netns",
        "--configure",
        "--disable-host-loopback",
        "--netns-type=path",
        f"/run/netns/{name}",
        "tap0",
    ]
    processes: list[subprocess.Popen[bytes]] = []
    data.mkdir(parents=True, exist_ok=True)
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with (run / "log").open("wb") as log:
            subprocess.run([*docker.enter, "ip", "link", "set", "lo", "up"], check=True)
            for command in (network, [*docker.enter, *dockerd]):
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        wait_until_up(docker, processes[-1], run / "log")
        yield docker
    finally:
        for process in reversed(processes):
            stop(process)
        # A signal may come between the start of a command and the return of Popen, which then names no process.
        for left in captured(["ip", "netns", "pids", name]).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(left), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], check=False)


def wait_until_up(docker: Docker, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while captured(["docker", "info"], env=docker.env).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            raise FailedError(f"dockerd did not come up: {log.read_text()[-1000:]}")
        time.sleep(0.5)


def stop(process: "subprocess.Popen[bytes]", number: signal.Signals = signal.SIGTERM) -> None:
    """End a process that leads a session, and what runs in its group."""
    for signalled in (number, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signalled)
            process.wait(STOP_SECONDS)
