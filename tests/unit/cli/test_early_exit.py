"""How a container ends whose command has not come to serve yet."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child")


@pytest.fixture
def first() -> tuple[str, ...]:
    """What a command line begins with to be the first process of its namespace, as a container's command is."""
    if not shutil.which("unshare") or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("not run: this user makes no namespace of processes")
    return UNSHARE


def test_a_container_that_is_still_starting_ends_at_sigterm(first: tuple[str, ...], tmp_path: Path) -> None:
    # Who reads the configuration waits for who writes it, and is in the midst of its start meanwhile.
    os.mkfifo(tmp_path / "deployment.json")
    env = {**os.environ, "MMROUTER_CONFIG": str(tmp_path), "POD_UID": "1"}
    process = subprocess.Popen([*first, sys.executable, "-m", "mmrouter_cli", "router"], env=env)
    try:
        writer = wait_for(lambda: opened(tmp_path / "deployment.json"), 30, "the router reads its configuration")
        (child,) = psutil.Process(process.pid).children()
        child.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
        os.close(writer)
    finally:
        process.kill()
        process.wait()


def test_a_command_that_is_stopped_while_it_is_imported_leaves_no_trace_of_that(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "typer.py").write_text(f"open({str(tmp_path / 'fifo')!r}).read()\n")
    # As a shell starts it in the foreground, also where these tests run in the background.
    argv = ["env", "--default-signal=INT", sys.executable, "-m", "mmrouter_cli", "bench"]
    process = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(tmp_path)}, stderr=subprocess.PIPE)
    try:
        writer = wait_for(lambda: opened(tmp_path / "fifo"), 30, "the command is imported")
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=10)
        os.close(writer)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, shown) == (128 + signal.SIGINT, b"")


def opened(fifo: Path) -> int | None:
    """Open a FIFO for writing, once a process reads it."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None
