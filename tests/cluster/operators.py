"""The operator as a process, under the rights that the chart gives it and no others, and the command line tool."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from cluster.access import Access
from cluster.controlplane import APPLY, ControlPlane, end
from cluster.resources import binding
from waiting import answers_ok, wait_for

from mmrouter_cli.local.loopback_network import can_bind

ROOT = Path(__file__).resolve().parents[2]
CLUSTER_ROLE = ROOT / "charts" / "mmrouter" / "files" / "clusterrole.yaml"
LEASE_ROLE = ROOT / "charts" / "mmrouter" / "files" / "lease-role.yaml"
NAMESPACE = "mmrouter-system"
ACCOUNT = "mmrouter-operator"
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
PORT = 9090
BRIEF = ("--lease-duration=6", "--renew-deadline=4", "--retry-period=0.4")
"""A Lease that another replica takes soon; one much shorter is lost where the machine is busy."""
_given: set[str] = set()


@dataclass
class Replica:
    """A running operator. ``identity`` is its name in the Lease and in its user agent."""

    plane: ControlPlane
    identity: str
    process: subprocess.Popen[bytes]
    address: str

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        end(self.process, signal.SIGKILL)

    def stop(self) -> int:
        end(self.process)
        return self.process.returncode

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log()[-3000:]
        return answers_ok(f"http://{self.address}:{PORT}/readyz")

    def metrics(self) -> str:
        return httpx.get(f"http://{self.address}:{PORT}/metrics", trust_env=False, timeout=5).text

    def log(self) -> str:
        return self.plane.log_file(self.identity).read_text()

    def leads(self) -> bool:
        return holder(self.plane) == self.identity


def holder(cluster: Access) -> str:
    answer = cluster.request("GET", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{ACCOUNT}")
    return str(answer.json()["spec"].get("holderIdentity") or "") if answer.is_success else ""


def install(plane: ControlPlane) -> None:
    """Make the operator's namespace, its ServiceAccount and its rights, as the chart does."""
    role, lease_role = (yaml.safe_load(file.read_text()) for file in (CLUSTER_ROLE, LEASE_ROLE))
    name, lease_name = role["metadata"]["name"], lease_role["metadata"]["name"]
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    here = f"{rbac}/namespaces/{NAMESPACE}"
    for path, body in (
        (f"/api/v1/namespaces/{NAMESPACE}", {"apiVersion": "v1", "kind": "Namespace"}),
        (f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}", {"apiVersion": "v1", "kind": "ServiceAccount"}),
        (f"{rbac}/clusterroles/{name}", role),
        (f"{here}/roles/{lease_name}", lease_role),
        (f"{here}/rolebindings/{lease_name}", binding("Role", lease_name, subject)),
        (f"{rbac}/clusterrolebindings/{name}", binding("ClusterRole", name, subject)),
    ):
        named = {**body, "metadata": {"name": path.rpartition("/")[2]}}
        plane.request("PATCH", path, named, APPLY, fieldManager="test", force="true").raise_for_status()


@contextmanager
def operator(
    plane: ControlPlane,
    identity: str = "operator",
    *,
    server: str = "",
    options: Sequence[str] = (),
    wait: bool = True,
    env: Mapping[str, str] | None = None,
) -> Iterator[Replica]:
    """Run a replica until the block ends; by default the block begins when it leads. ``options``: where it does not end
    in order, :data:`BRIEF` among them lets the next one lead without a long wait. ``server``: another URL than the API
    server's, a proxy's. ``env``: variables beside this process's.
    """
    install(plane)
    config = plane.kubeconfig_for(NAMESPACE, ACCOUNT, server)
    host, _, last = plane.address.rpartition(".")
    candidates = (f"{host}.{number}" for number in range(253, int(last), -1))
    address = next(ip for ip in candidates if ip not in _given and can_bind(ip, PORT))
    _given.add(address)
    argv = [
        *(sys.executable, "-m", "mmrouter_cli", "operator", f"--kubeconfig={config}", f"--identity={identity}"),
        *(f"--lease-namespace={NAMESPACE}", f"--bind={address}:{PORT}", "--log-format=text", *options),
    ]
    replica = Replica(plane, identity, plane.spawn(identity, argv, {**os.environ, **(env or {})}), address)
    try:
        if wait:
            wait_for(replica.ready, 30, f"{identity} has filled its caches")
            wait_for(replica.leads, 30, f"{identity} leads")
        yield replica
    except Exception:  # whatever failed, also in the test: what the operator wrote goes with the control plane
        print(f"the operator {identity}, exit status {replica.process.poll()}, wrote at last:\n{replica.log()[-6000:]}")
        raise
    finally:
        _given.discard(address)
        if replica.process.poll() is None:
            replica.stop()


def idle(plane: ControlPlane, user: str, seconds: float, deadline: float) -> float:
    """Wait until ``user`` has written nothing but Leases for ``seconds`` and return since when (seconds, epoch)."""

    def quiet() -> float:
        rows = [row for row in plane.audit() if row.user == user and row.writes and row.resource != "leases"]
        last = max((row.ended for row in rows), default=0.0)
        return last if time.time() - last >= seconds else 0.0

    return float(wait_for(quiet, deadline, f"{user} writes nothing for {seconds:g} s", every=0.2))


SECONDS = 120


@dataclass(frozen=True)
class Told:
    """What `mmrouter doctor` said, of all subjects together."""

    status: int
    findings: list[dict[str, str]]

    def seen(self, check: str, level: str = "problem") -> list[str]:
        return [item["seen"] for item in self.findings if (item["check"], item["level"]) == (check, level)]

    def advice(self, check: str) -> list[str]:
        return [item["do"] for item in self.findings if item["check"] == check and item["do"]]

    @property
    def problems(self) -> list[dict[str, str]]:
        return [item for item in self.findings if item["level"] == "problem"]


def mmrouter(
    cluster: Access, *arguments: str, kubeconfig: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with a kubeconfig, by default the administrator's; the caller looks at ``returncode``."""
    argv = [sys.executable, "-m", "mmrouter_cli", *arguments, f"--kubeconfig={kubeconfig or cluster.kubeconfig}"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False, env=env)


def diagnosed(
    cluster: Access, *arguments: str, kubeconfig: Path | None = None, env: Mapping[str, str] | None = None
) -> Told:
    done = mmrouter(cluster, "doctor", *arguments, "--json", kubeconfig=kubeconfig, env=env)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] == (done.returncode == 0)
    return Told(done.returncode, [item for subject in report["subjects"] for item in subject["findings"]])


def views(cluster: Access, *arguments: str, env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    done = mmrouter(cluster, "status", *arguments, "--json", env=env)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
