"""Deployments in real pods: made, waited for, and what a test looks at in them."""

import base64
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cluster.access import Access
from cluster.resources import apply, is_done
from e2e.processes import statuses
from e2e.report import dump
from waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "tiny-qwen2-vl"
READY_SECONDS = 120
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
"""Labels of a namespace that lets only restricted pods in."""


@dataclass(frozen=True)
class Deployed:
    """A deployment ``name`` that is ready and proved."""

    cluster: Access
    namespace: str
    name: str

    def pods(self, role: str) -> list[dict[str, Any]]:
        """Return the running pods of a role."""
        labels = f"mmrouter.io/deployment={self.name},mmrouter.io/role={role}"
        answer = self.cluster.request("GET", f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=labels)
        items = answer.raise_for_status().json()["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def execute(
        self, pod: str, container: str, *command: str, stdin: str | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command in a container; the caller looks at ``returncode``."""
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
        """Return the keys that the operator made for it."""
        path = f"/api/v1/namespaces/{self.namespace}/secrets/{self.name}-secrets"
        data = self.cluster.request("GET", path).raise_for_status().json()["data"]
        return {name: base64.b64decode(value) for name, value in data.items()}

    def token(self) -> str:
        """Return the token of the control API."""
        return self.secret()["control.token"].decode()


def example() -> dict[str, Any]:
    """Return ``examples/kind.yaml``: simulated engines, with the model in a ConfigMap."""
    body: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "kind.yaml").read_text())
    return body


def make_model(cluster: Access, namespace: str) -> None:
    """Make the ConfigMap with the model of the examples. Raises ``AssertionError``."""
    done = cluster.kubectl("-n", namespace, "create", "configmap", MODEL.name, f"--from-file={MODEL}")
    assert done.returncode == 0, done.stderr


def deploy(cluster: Access, namespace: str, body: Mapping[str, Any], seconds: float = READY_SECONDS) -> Deployed:
    """Apply a resource and wait until it is Ready, which says exactness too. Raises ``AssertionError`` with a dump."""
    name = body["metadata"]["name"]
    generation = apply(cluster, namespace, dict(body))["metadata"]["generation"]
    wait_or_dump(cluster, namespace, lambda: is_done(cluster, namespace, name, generation), seconds, "Ready is True")
    return Deployed(cluster, namespace, name)


def wait_or_dump(cluster: Access, namespace: str, condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait as :func:`wait_for` does. Raises ``AssertionError`` with a dump of the namespace."""
    try:
        return wait_for(condition, seconds, what, every=0.2)
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{dump(cluster, namespace)}") from error
