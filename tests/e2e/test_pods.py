"""A deployment in real pods: it is exact, from outside and from inside, and its pods have only what they need."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

from e2e.deploying import Deployed
from e2e.reach import CONTROL_PORT, address, reached

SIDECAR_MIB = 60
STATUS = """\
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status["CapEff"].strip(), status["NoNewPrivs"].strip(), status["Seccomp"].strip(), status["Uid"].split()[0])
"""


def test_verify_is_green_from_outside_the_cluster(deployed: Deployed) -> None:
    with reached(deployed) as where:
        options = (f"--control={where.controls[0]}", f"--token={where.token}")
        command = [sys.executable, "-m", "mmrouter_cli", "verify", where.url, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_verify_is_green_from_inside_by_the_services_name(deployed: Deployed) -> None:
    pod = deployed.pods("frontend")[0]
    url = f"http://{deployed.name}.{deployed.namespace}.svc"
    options = (f"--control=http://{address(pod)}:{CONTROL_PORT}", f"--token={deployed.token()}")
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
