"""A deployment in real pods: it is exact, from outside and from inside, and its pods have only what they need."""

import base64
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from e2e.conftest import Deployed
from e2e.plane import Node

CONTROL_PORT = 8001
SIDECAR_MIB = 60
STATUS = """\
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status["CapEff"].strip(), status["NoNewPrivs"].strip(), status["Seccomp"].strip(), status["Uid"].split()[0])
"""


def token(deployed: Deployed) -> str:
    path = f"/api/v1/namespaces/{deployed.namespace}/secrets/{deployed.name}-secrets"
    data = deployed.cluster.request("GET", path).raise_for_status().json()["data"]
    return base64.b64decode(data["control.token"]).decode()


def address(pod: dict[str, Any]) -> str:
    return str(pod["status"]["podIP"])


@contextmanager
def reached(deployed: Deployed) -> Iterator[tuple[str, str]]:
    """Return the URLs of the Service and of a frontend's control API, as this machine reaches them."""
    frontend = deployed.pods("frontend")[0]
    if isinstance(deployed.cluster, Node):  # by its own addresses
        path = f"/api/v1/namespaces/{deployed.namespace}/services/{deployed.name}"
        spec = deployed.cluster.request("GET", path).raise_for_status().json()["spec"]
        yield f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}", f"http://{address(frontend)}:{CONTROL_PORT}"
        return
    with (
        forwarded(deployed, f"service/{deployed.name}", 80) as url,
        forwarded(deployed, f"pod/{frontend['metadata']['name']}", CONTROL_PORT) as control,
    ):
        yield url, control


@contextmanager
def forwarded(deployed: Deployed, target: str, port: int) -> Iterator[str]:
    """Forward a port of the cluster to a free one of this machine."""
    cluster = deployed.cluster
    options = (f"--kubeconfig={cluster.kubeconfig}", f"--namespace={deployed.namespace}")
    command = [str(cluster.bin / "kubectl"), *options, "port-forward", target, f":{port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://{process.stdout.readline().split()[2]}"
    finally:
        process.terminate()
        process.communicate()


def test_verify_is_green_from_outside_the_cluster(deployed: Deployed) -> None:
    with reached(deployed) as (url, control):
        options = (f"--control={control}", f"--token={token(deployed)}")
        command = [sys.executable, "-m", "mmrouter_cli", "verify", url, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_verify_is_green_from_inside_by_the_services_name(deployed: Deployed) -> None:
    pod = deployed.pods("frontend")[0]
    url = f"http://{deployed.name}.{deployed.namespace}.svc"
    options = (f"--control=http://{address(pod)}:{CONTROL_PORT}", f"--token={token(deployed)}")
    done = deployed.execute(pod["metadata"]["name"], "router", "mmrouter", "verify", url, *options)
    assert done.returncode == 0, done.stdout + done.stderr


def test_containers_run_without_capabilities_and_cannot_write_their_root(deployed: Deployed) -> None:
    for role, container in (("frontend", "router"), ("worker", "sidecar"), ("worker", "engine")):
        pod = deployed.pods(role)[0]["metadata"]["name"]
        told = deployed.execute(pod, container, "python3", "-c", STATUS)
        assert told.stdout.split() == ["0000000000000000", "1", "2", "65532"], told.stderr
        written = deployed.execute(pod, container, "touch", "/written")
        assert "Read-only file system" in written.stderr


def test_engine_pods_hold_no_token_of_the_api_server(deployed: Deployed) -> None:
    pod = deployed.pods("worker")[0]["metadata"]["name"]
    for container in ("sidecar", "engine"):
        assert deployed.execute(pod, container, "ls", "/var/run/secrets/kubernetes.io").returncode != 0


def test_an_idle_sidecar_is_small(deployed: Deployed, record: Callable[[str, Any], None]) -> None:
    pod = deployed.pods("worker")[0]["metadata"]["name"]
    # The container's first process is the sidecar itself.
    status = deployed.execute(pod, "sidecar", "cat", "/proc/1/status").stdout
    lines = dict(line.split(":", 1) for line in status.splitlines())
    assert lines["Name"].strip() == "mmrouter"
    mib = int(lines["VmRSS"].split()[0]) / 1024
    record("sidecar, MiB resident", round(mib, 1))
    assert mib < SIDECAR_MIB


def test_the_images_hold_no_compiler(deployed: Deployed) -> None:
    for role, container in (("frontend", "router"), ("worker", "engine")):
        pod = deployed.pods(role)[0]["metadata"]["name"]
        found = deployed.execute(pod, container, "sh", "-c", "command -v cc gcc g++ clang make")
        assert found.stdout.strip() == ""
