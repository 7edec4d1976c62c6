"""The one-node cluster itself: real pods run on it, nothing of it is left, and only who may kills its processes."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.deploying import run_pod
from e2e.images import write_pause
from e2e.network import Network, hierarchies
from e2e.node import PAUSE, Node, Programs
from e2e.report import Dumps, Place
from waiting import wait_for

TESTS = Path(__file__).resolve().parents[1]
RUN = """\
import sys, time
from pathlib import Path
from e2e.node import Programs, node
folder, kube, node_bin, cni = map(Path, sys.argv[1:])
with node(folder / "run", Programs(kube, node_bin, cni), folder / "pause.tar") as plane:
    print(plane.network.number, flush=True)
    time.sleep(3600)
"""


def left(network: Network, folder: Path) -> list[str]:
    places = [Path("/run/netns", network.name), Path("/sys/class/net", network.interface)]
    found = [str(path) for path in (*places, *(root / network.name for root in hierarchies())) if path.exists()]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if str(folder).encode() in path.read_bytes():
                found.append(str(path))
    return found


def test_a_pod_runs_and_is_reached_from_this_machine(bare: Node) -> None:
    container = {"name": "pause", "image": PAUSE, "imagePullPolicy": "Never"}
    manifest = {"metadata": {"name": "pause"}, "spec": {"containers": [container]}}
    with bare.namespace() as namespace:
        ip = run_pod(bare, namespace, manifest, 30)
        with socket.socket() as client:
            client.settimeout(5)
            # Nothing listens there, which only the pod's own network can tell.
            assert client.connect_ex((ip, 1)) == errno.ECONNREFUSED


def test_nothing_is_left_of_a_node_whose_run_was_killed(programs: Programs, tmp_path: Path, dumps: Dumps) -> None:
    dumps.places["killed"] = Place((tmp_path / "run" / "log",))
    write_pause(tmp_path / "pause.tar")
    arguments = [str(tmp_path), str(programs.kube), str(programs.node), str(programs.cni)]
    run = subprocess.Popen([sys.executable, "-c", RUN, *arguments], cwd=TESTS, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    network = Network(int(run.stdout.readline()))
    assert left(network, tmp_path)
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_for(lambda: not left(network, tmp_path), 20, "everything is gone")
    run.stdout.close()
    del dumps.places["killed"]


UNPRIVILEGED = 65534
ASK = """\
import os, sys
from _pytest.outcomes import Skipped
from e2e import deploying
deploying.process = lambda pod, container: deploying.Process(os.getppid(), container)  # that of this test
os.setuid(int(sys.argv[1]))
try:
    print(deploying.process_here({}, "router").pid == os.getppid())
except Skipped as reason:
    print(reason)
"""


def asked(user: int) -> str:
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run([sys.executable, "-c", ASK, str(user)], capture_output=True, text=True, env=env).stdout


def test_who_may_not_signal_a_process_does_not_get_it() -> None:
    if os.geteuid() != 0:
        pytest.skip("not run: needs root, to become another user")
    assert asked(UNPRIVILEGED) == "not run: needs the node's processes\n"


def test_who_may_signal_a_process_gets_it() -> None:
    assert asked(os.getuid()) == "True\n"
