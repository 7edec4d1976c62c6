"""The one-node cluster itself: real pods run on it, and nothing of it is left, however a run ends."""

import contextlib
import errno
import signal
import socket
import subprocess
import sys
from pathlib import Path

from e2e.groups import hierarchies
from e2e.network import Network
from e2e.node import Node, Programs
from e2e.pause import write_pause
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
    """Return what is left of a node: its namespace, its interface, control groups, processes."""
    places = [Path("/run/netns", network.name), Path("/sys/class/net", network.interface)]
    found = [str(path) for path in (*places, *(root / network.name for root in hierarchies())) if path.exists()]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if str(folder).encode() in path.read_bytes():
                found.append(str(path))
    return found


def test_a_pod_runs_and_is_reached_from_this_machine(bare: Node) -> None:
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pause"},
        "spec": {"containers": [{"name": "pause", "image": "localhost/mmrouter-pause:1", "imagePullPolicy": "Never"}]},
    }
    with bare.namespace() as namespace:
        path = f"/api/v1/namespaces/{namespace}"
        account = f"{path}/serviceaccounts/default"
        wait_for(lambda: bare.request("GET", account).is_success, 10, "the namespace has its account")
        bare.request("POST", f"{path}/pods", manifest).raise_for_status()

        def running() -> str:
            status = bare.request("GET", f"{path}/pods/pause").json()["status"]
            return str(status.get("podIP", "")) if status["phase"] == "Running" else ""

        ip = wait_for(running, 30, "the pod runs")
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
