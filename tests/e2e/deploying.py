"""Deployments in real pods: made, waited for, looked at, and the processes of their containers, to be killed."""

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.access import Access
from cluster.resources import apply, get, is_done
from e2e.report import dump, statuses
from waiting import wait_for

from mmrouter_operator.model.kinds import RESOURCE

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "tiny-qwen2-vl"
READY_SECONDS = 120
EC_FLAG = "--ec-transfer-config"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@dataclass(frozen=True)
class Deployed:
    """A deployment ``name`` that is ready and proved."""

    cluster: Access
    namespace: str
    name: str

    def pods(self, role: str) -> list[dict[str, Any]]:
        found = self.cluster.pods(self.namespace, deployment=self.name, role=role)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def execute(
        self, pod: str, container: str, *command: str, stdin: str | None = None
    ) -> "subprocess.CompletedProcess[str]":
        options = ("-i",) if stdin is not None else ()
        where = ("-n", self.namespace, "exec", *options, pod, "-c", container)
        return self.cluster.kubectl(*where, "--", *command, stdin=stdin)

    def containers(self) -> dict[tuple[str, str], tuple[str, int]]:
        """Return the containers of all pods: the pod's uid and their name -> their id and how often they restarted."""
        return {
            (pod["metadata"]["uid"], each["name"]): (each["containerID"], each["restartCount"])
            for role in ("frontend", "worker")
            for pod in self.pods(role)
            for each in statuses(pod)
        }

    def secret(self) -> dict[str, bytes]:
        data = get(self.cluster, "Secret", self.namespace, f"{self.name}-secrets")["data"]
        return {name: base64.b64decode(value) for name, value in data.items()}

    def token(self) -> str:
        return self.secret()["control.token"].decode()


def example() -> dict[str, Any]:
    """Return ``examples/kind.yaml``: simulated engines, with the model in a ConfigMap."""
    body: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "kind.yaml").read_text())
    return body


def make_model(cluster: Access, namespace: str) -> None:
    done = cluster.kubectl("-n", namespace, "create", "configmap", MODEL.name, f"--from-file={MODEL}")
    assert done.returncode == 0, done.stderr


def deploy(cluster: Access, namespace: str, body: Mapping[str, Any], seconds: float = READY_SECONDS) -> Deployed:
    """Apply a resource and wait until it is Ready, which says exactness too. Raises ``TimeoutError`` with a dump."""
    name = body["metadata"]["name"]
    generation = apply(cluster, namespace, dict(body))["metadata"]["generation"]
    wait_or_dump(cluster, namespace, lambda: is_done(cluster, namespace, name, generation), seconds, "Ready is True")
    return Deployed(cluster, namespace, name)


@contextlib.contextmanager
def deployment(cluster: Access, body: Mapping[str, Any]) -> Iterator[Deployed]:
    """Deploy a resource with the example's model, in a namespace of its own that lets only restricted pods in."""
    with cluster.namespace(**RESTRICTED) as namespace:
        make_model(cluster, namespace)
        yield deploy(cluster, namespace, body)


def flag_field(pod: dict[str, Any], flag: str, field: str) -> Any:
    """Return a field of a JSON flag of a pod's engine, ``None`` without the flag."""
    args = pod["spec"]["containers"][0]["args"]
    return json.loads(args[args.index(flag) + 1])[field] if flag in args else None


def mounted(pod: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the volume that a pod's engine has at a folder. Raises ``StopIteration`` without one."""
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    name = next(mount["name"] for mount in mounts if mount["mountPath"] == folder)
    found: dict[str, Any] = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == name)
    return found


def choices(deployed: Deployed) -> list[str]:
    """Return what `mmrouter plan` prints about the operator's choices for a deployment's resource."""
    body = get(deployed.cluster, RESOURCE, deployed.namespace, deployed.name)
    file = deployed.cluster.folder / f"{deployed.namespace}-{deployed.name}.json"
    file.write_text(json.dumps({name: body[name] for name in ("apiVersion", "kind", "metadata", "spec")}))
    argv = [sys.executable, "-m", "mmrouter_cli", "plan", str(file), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)["choices"]
    return found


def run_pod(cluster: Access, namespace: str, body: Mapping[str, Any], seconds: float = 60) -> str:
    """Run a pod and return its address once it is Ready. Raises ``TimeoutError`` with a dump."""
    core, name = f"/api/v1/namespaces/{namespace}", body["metadata"]["name"]
    account = f"{core}/serviceaccounts/default"
    wait_for(lambda: cluster.request("GET", account).is_success, 10, "the namespace has its account")
    cluster.request("POST", f"{core}/pods", body).raise_for_status()

    def ready() -> str:
        status = cluster.read(f"{core}/pods/{name}")["status"]
        states = {each["type"]: each["status"] for each in status.get("conditions") or []}
        return str(status["podIP"]) if states.get("Ready") == "True" else ""

    return str(wait_or_dump(cluster, namespace, ready, seconds, f"pod {name} is Ready"))


def wait_or_dump(cluster: Access, namespace: str, condition: Callable[[], Any], seconds: float, what: str) -> Any:
    return wait_for(condition, seconds, what, every=0.2, known=partial(dump, cluster, namespace))


GONE_SECONDS = 10.0


@dataclass(frozen=True)
class Process:
    pid: int
    container: str

    def ours(self) -> bool:
        """Whether this user may signal it: on kind, a node's processes are seen and belong to root."""
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            return False
        return True

    def kill(self) -> float:
        """Kill it with -9 and wait until it is gone; return when, in seconds since 1970."""
        with self._handle() as handle:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            gone, _, _ = select.select([handle], [], [], GONE_SECONDS)
        assert gone, f"process {self.pid} does not end"
        return time.time()

    def stop(self) -> None:
        """Stop it and wait until none of its threads runs."""
        with self._handle() as handle:
            signal.pidfd_send_signal(handle, signal.SIGSTOP)
        wait_for(self._is_stopped, GONE_SECONDS, f"process {self.pid} is stopped", every=0.001)

    def go_on(self) -> None:
        with self._handle() as handle:
            signal.pidfd_send_signal(handle, signal.SIGCONT)

    def _is_stopped(self) -> bool:
        try:
            threads = [each.read_text() for each in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        except OSError:  # a thread has just ended
            return False
        return bool(threads) and all(each.rpartition(")")[2].split()[0] == "T" for each in threads)

    @contextlib.contextmanager
    def _handle(self) -> Iterator[int]:
        handle = os.pidfd_open(self.pid)
        try:
            assert _is_in(self.pid, self.container), "the number is another process's by now"
            yield handle
        finally:
            os.close(handle)

    def started(self) -> float:
        ticks = int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age


def process(pod: dict[str, Any], container: str) -> Process | None:
    identifier = container_id(pod, container)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if identifier and _is_in(int(folder.name), identifier):
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                if status["NSpid"].split()[-1] == "1":
                    return Process(int(folder.name), identifier)
    return None


def process_here(pod: dict[str, Any], container: str) -> Process:
    """Return the first process of a pod's container. Where it is not seen or not ours to kill, the test is skipped."""
    found = process(pod, container)
    if found is None or not found.ours():
        pytest.skip("not run: needs the node's processes")
    return found


def _is_in(pid: int, container: str) -> bool:
    return container in Path(f"/proc/{pid}/cgroup").read_text()


def container_id(pod: dict[str, Any], container: str) -> str:
    status = next(each for each in statuses(pod) if each["name"] == container)
    return str(status.get("containerID", "")).rpartition("//")[2]
