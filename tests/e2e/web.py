"""A web server in a pod, for the frontends of a deployment to fetch pictures from."""

import base64
from dataclasses import dataclass
from typing import Any

from cluster.access import Access
from e2e.report import dump
from waiting import wait_for

PORT = 8080
NAME = "pictures"
FOLDER = "/pictures"
START_SECONDS = 60


@dataclass(frozen=True)
class PodWeb:
    """A pod that serves files at its address ``ip``."""

    cluster: Access
    namespace: str
    ip: str

    def put(self, name: str, content: bytes) -> str:
        """Serve a file in place of what has its name; return its URL. Raises ``AssertionError``."""
        command = ("sh", "-c", f"base64 -d > {FOLDER}/{name}.new && mv {FOLDER}/{name}.new {FOLDER}/{name}")
        written = self.cluster.kubectl(
            *("-n", self.namespace, "exec", "-i", NAME, "--", *command), stdin=base64.b64encode(content).decode()
        )
        assert written.returncode == 0, written.stderr
        return f"http://{self.ip}:{PORT}/{name}"

    @property
    def media(self) -> dict[str, Any]:
        """``spec.routing.media`` of a deployment that fetches from here and from nowhere else."""
        prefix = 128 if ":" in self.ip else 32
        return {"fetch": "allowList", "allowedHosts": [self.ip], "allowedCIDRs": [f"{self.ip}/{prefix}"]}


def pod_web(cluster: Access, namespace: str, image: str) -> PodWeb:
    """Run the pod, from an image that has Python, and wait for it. Raises ``AssertionError``."""
    where = f"/api/v1/namespaces/{namespace}/pods"
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    wait_for(lambda: cluster.request("GET", account).is_success, 10, "the namespace has its account")
    cluster.request("POST", where, manifest(image)).raise_for_status()

    def ready() -> str:
        status = cluster.request("GET", f"{where}/{NAME}").raise_for_status().json()["status"]
        states = {each["type"]: each["status"] for each in status.get("conditions") or []}
        return str(status["podIP"]) if states.get("Ready") == "True" else ""

    try:
        ip = wait_for(ready, START_SECONDS, "the web server is ready", every=0.1)
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{dump(cluster, namespace)}") from error
    return PodWeb(cluster, namespace, ip)


def manifest(image: str) -> dict[str, Any]:
    """Return the pod, such as a restricted namespace lets in."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": NAME},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "fsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "web",
                    "image": image,
                    "command": ["python3", "-m", "http.server", str(PORT), "--directory", FOLDER],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
                    "volumeMounts": [{"name": "files", "mountPath": FOLDER}],
                }
            ],
            "volumes": [{"name": "files", "emptyDir": {}}],
        },
    }
