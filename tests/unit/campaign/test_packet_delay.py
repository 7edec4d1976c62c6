"""Packets of a network namespace are delayed, in their order and without a loss."""

import os
import subprocess
import sys

import pytest

ASK = """
import socket, subprocess, time, threading
from campaign.faults.injection import Victim, injected
from campaign.faults import injection
server = socket.create_server(("127.0.0.1", 0))
def answer():
    connection, _ = server.accept()
    while data := connection.recv(1 << 16):
        connection.sendall(data)
threading.Thread(target=answer, daemon=True).start()
client = socket.create_connection(server.getsockname())
def ask(content):
    began = time.monotonic()
    client.sendall(content)
    got = b""
    while len(got) < len(content):
        got += client.recv(1 << 16)
    assert got == content
    return time.monotonic() - began
ask(b"warm")
try:
    with injected("delay", Victim("sidecar", "a", "127.0.0.1", None), None):
        pass
except (OSError, subprocess.CalledProcessError):
    raise SystemExit("no NFQUEUE")
with injected("delay", Victim("sidecar", "a", "127.0.0.1", None), None):
    slow = [ask(bytes([number]) * 3000) for number in range(5)]
assert min(slow) >= 2 * injection.DELAY_SECONDS, slow
large = bytes(range(256)) * 4096
with injected("delay", Victim("sidecar", "a", "127.0.0.1", None), None):
    client.sendall(large)
got = b""
while len(got) < len(large):
    got += client.recv(1 << 16)
assert got == large
print("ended")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: it needs root, for a network namespace")
def test_a_delayed_connection_answers_later_and_loses_nothing_when_the_delay_ends():
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" -c "$1"', sys.executable, ASK],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.stderr in ("no NFQUEUE\n", "unshare: unshare failed: Operation not permitted\n"):
        pytest.skip("not run: the kernel gives no namespaces, or has no NFQUEUE")
    assert done.stdout == "ended\n", done.stderr
