"""A container's process is killed only where it may be: who sees it and is not its owner does not run the test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
UNPRIVILEGED = 65534
ASK = """\
import os, sys
from _pytest.outcomes import Skipped
from e2e import processes
processes.process = lambda pod, container: processes.Process(os.getppid(), container)  # that of this test
os.setuid(int(sys.argv[1]))
try:
    print(processes.process_here({}, "router").pid == os.getppid())
except Skipped as reason:
    print(reason)
"""


def asked(user: int) -> str:
    """Return the output for a user who looks for a process of this one's."""
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run([sys.executable, "-c", ASK, str(user)], capture_output=True, text=True, env=env).stdout


def test_who_may_not_signal_a_process_does_not_get_it() -> None:
    if os.geteuid() != 0:
        pytest.skip("not run: needs root, to become another user")
    assert asked(UNPRIVILEGED) == "not run: needs the node's processes\n"


def test_who_may_signal_a_process_gets_it() -> None:
    assert asked(os.getuid()) == "True\n"
