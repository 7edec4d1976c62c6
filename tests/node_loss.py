"""Loss of a node: no packet reaches an address or comes from it, so that no connection to it is ever closed.

The rules are those of a network namespace that a test module enters before it starts its processes. Needs root.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_NEW_NETWORK = 0x40000000


def why_impossible() -> str:
    """Return why this machine cannot lose a node, empty where it can."""
    if os.geteuid():
        return "it needs root, for a network namespace"
    lacking = [tool for tool in ("ip", "iptables") if shutil.which(tool, path=PATH) is None]
    return f"it needs {', '.join(lacking)}" if lacking else ""


@contextmanager
def own_network() -> Iterator[None]:
    """Move this thread, with what it starts, into a network namespace until the block ends, where possible."""
    if why_impossible():
        yield
        return
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    _call("unshare", _NEW_NETWORK)
    try:
        _tool("ip", "link", "set", "lo", "up")
        yield
    finally:
        _call("setns", before, _NEW_NETWORK)
        os.close(before)


@contextmanager
def losing_nodes() -> Iterator[Callable[[str], None]]:
    """Yield what loses the node with an address; all are back at the block's end. Skips the test where impossible."""
    if why := why_impossible():
        pytest.skip(f"not run: {why}")

    def lose(address: str) -> None:
        for direction in ("-d", "-s"):
            _tool("iptables", "-w", "-A", "INPUT", direction, address, "-j", "DROP")

    try:
        yield lose
    finally:
        _tool("iptables", "-w", "-F", "INPUT")


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name} failed")


def _tool(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PATH": PATH})
