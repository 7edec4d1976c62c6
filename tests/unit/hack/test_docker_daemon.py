"""The Docker daemon of ``make kind``: it ends with the process that runs it."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.build_once import ROOT, CannotMakeError
from hack.kind.docker_daemon import require

RUN = """\
import sys
from pathlib import Path
from hack.kind.docker_daemon import daemon
with daemon(*map(Path, sys.argv[1:])) as docker:
    docker.attend(["sh", "-c", "echo up; sleep 3600; true"])
"""


def left(name: str, network: int) -> list[str]:
    """Return the processes that name a network namespace or run in it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if name in command or os.stat(process / "ns" / "net").st_ino == network:
                found.append(command)
        except OSError:  # it has just ended
            continue
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for sockets, whose paths have at most 104 characters: pytest's own grow with its runs."""
    with tempfile.TemporaryDirectory(prefix="docker-") as made:
        yield Path(made)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_of_a_daemon_outlives_an_ended_run(folder: Path, number: signal.Signals) -> None:
    try:
        require()
    except CannotMakeError as error:
        pytest.skip(f"not run: {error}")
    (folder / "run").mkdir()
    command = [sys.executable, "-c", RUN, str(folder / "data"), str(folder / "run")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "up\n", (folder / "run" / "log").read_text()
        name = f"mmrouter-docker-{run.pid}"
        namespace = Path("/run/netns", name)
        network = namespace.stat().st_ino
        commands = " ".join(left(name, network))
        assert all(each in commands for each in ("dockerd", "slirp4netns", "sleep 3600"))
        run.send_signal(number)
        run.wait(180)
    assert (left(name, network), namespace.exists()) == ([], False)
