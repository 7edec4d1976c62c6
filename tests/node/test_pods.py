"""A deployment in real pods: it is exact, from outside and from inside, and its pods have only what they need."""

import base64
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.conftest import Deployed

CONTROL_PORT = 8001
SIDECAR_MIB = 60
STATUS = """\
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status["CapEff"].strip(), status["NoNewPrivs"].strip(), status["Seccomp"].strip(), status["Uid"].split()[0])
"""


def token(deployed: Deployed) -> str:
    path = f"/api/v1/namespaces/{deployed.namespace}/secrets/{deployed.name}-secrets"
    data = deployed.node.request("GET", path).raise_for_status().json()["data"]
    return base64.b64decode(data["control.token"]).decode()


def address(pod: dict[str, Any]) -> str:
    return str(pod["status"]["podIP"])


def test_verify_is_green_from_outside_the_cluster(deployed: Deployed) -> None:
    service = f"/api/v1/namespaces/{deployed.namespace}/services/{deployed.name}"
    spec = deployed.node.request("GET", service).raise_for_status().json()["spec"]
    control = f"http://{address(deployed.pods('frontend')[0])}:{CONTROL_PORT}"
    url = f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"
    command = [
        sys.executable,
        "-m",
        "mmrouter_cli",
        "verify",
        url,
        f"--control={control}",
        f"--token={token(deployed)}",
    ]
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
    (status,) = deployed.pods("worker")[0]["status"]["initContainerStatuses"]
    process = Path("/proc", str(deployed.node.process(status["containerID"])), "status")
    lines = dict(line.split(":", 1) for line in process.read_text().splitlines())
    mib = int(lines["VmRSS"].split()[0]) / 1024
    record("sidecar, MiB resident", round(mib, 1))
    assert mib < SIDECAR_MIB


def test_the_images_hold_no_compiler(deployed: Deployed) -> None:
    for role, container in (("frontend", "router"), ("worker", "engine")):
        pod = deployed.pods(role)[0]["metadata"]["name"]
        found = deployed.execute(pod, container, "sh", "-c", "command -v cc gcc g++ clang make")
        assert found.stdout.strip() == ""
