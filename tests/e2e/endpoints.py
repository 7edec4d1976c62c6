"""A deployment as this machine reaches it: by its own addresses where they are routed; and a web server beside it."""

import base64
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from cluster.access import Access
from cluster.resources import path
from e2e.deploying import Deployed, run_pod
from e2e.node import Node
from scenarios import Chat

CONTROL_PORT = 8001
CONNECT_SECONDS = 1.0


@dataclass(frozen=True)
class Reached:
    """URLs of a deployment's Service and of the control API of each of its frontends, and the token of the latter."""

    url: str
    controls: tuple[str, ...]
    token: str

    def client(self, **options: Any) -> openai.OpenAI:
        headers = {"x-mmrouter-control": self.token}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", default_headers=headers, timeout=60, **options)

    def control(self, number: int = 0) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.controls[number], headers=headers, timeout=10, trust_env=False)

    def mmrouter(self, command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run the command line tool on this machine, for the first frontend; the caller looks at ``returncode``."""
        options = (*arguments, f"--control={self.controls[0]}", f"--token={self.token}")
        argv = [sys.executable, "-m", "mmrouter_cli", command, self.url, *options]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)

    @contextmanager
    def chat(self, model: str) -> Iterator[Chat]:
        """Return a conversation of its own, which sees all frontends."""
        with ExitStack() as stack:
            controls = [stack.enter_context(self.control(number)) for number in range(len(self.controls))]
            yield Chat(model, stack.enter_context(self.client()), controls)


@contextmanager
def reached(deployed: Deployed) -> Iterator[Reached]:
    """Return where a deployment is, for the frontends that it has now."""
    with ExitStack() as stack:
        url = stack.enter_context(at_service(deployed))
        controls = [stack.enter_context(at_pod(deployed, pod, CONTROL_PORT)) for pod in deployed.pods("frontend")]
        yield Reached(url, tuple(controls), deployed.token())


@contextmanager
def at_service(deployed: Deployed, *, outlives: bool = False) -> Iterator[str]:
    """Return the URL of a deployment's Service for this machine. Where its own address is not routed, a port is
    forwarded to one frontend. With ``outlives`` the API server passes each request on to a ready one instead: a
    forwarded port would end with its frontend.
    """
    place = path("Service", deployed.namespace, deployed.name)
    spec = deployed.cluster.read(place)["spec"]
    host, port = str(spec["clusterIP"]), int(spec["ports"][0]["port"])
    if _routed(deployed.cluster, host, port):
        yield f"http://{host}:{port}"
    elif outlives:
        with deployed.cluster.serving("proxy", "--port=0") as line:
            yield f"http://{line.split()[-1]}{place}:{port}/proxy"
    else:
        with forwarded(deployed, f"service/{deployed.name}", port) as url:
            yield url


@contextmanager
def at_pod(deployed: Deployed, pod: dict[str, Any], port: int) -> Iterator[str]:
    """Return the URL of a pod's port for this machine. The test is skipped where there is none: an engine's pod
    listens on its own address, and a forwarded port ends at the loopback address.
    """
    if _routed(deployed.cluster, address(pod), port):
        yield f"http://{address(pod)}:{port}"
    elif pod["metadata"]["labels"].get("mmrouter.io/role") != "frontend":
        pytest.skip("not run: this machine reaches no addresses of pods")
    else:
        with forwarded(deployed, f"pod/{pod['metadata']['name']}", port) as url:
            yield url


def address(pod: dict[str, Any]) -> str:
    return str(pod["status"]["podIP"])


@contextmanager
def forwarded(deployed: Deployed, target: str, port: int) -> Iterator[str]:
    """Forward a port of the cluster to a free one of this machine; gives its URL. Raises ``AssertionError``."""
    where = f"--namespace={deployed.namespace}"
    with deployed.cluster.serving(where, "port-forward", target, f":{port}") as line:
        yield f"http://{line.split()[2]}"


def _routed(cluster: Access, host: str, port: int) -> bool:
    """Whether this machine reaches an address as pods do, which it always does on a node of our own."""
    if isinstance(cluster, Node):
        return True
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


PORT = 8080
NAME = "pictures"
FOLDER = "/pictures"


@dataclass(frozen=True)
class PodWeb:
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
    return PodWeb(cluster, namespace, run_pod(cluster, namespace, manifest(image)))


def manifest(image: str) -> dict[str, Any]:
    command = ["python3", "-m", "http.server", str(PORT), "--directory", FOLDER]
    restricted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    web = {
        **{"name": "web", "image": image, "command": command, "securityContext": restricted},
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": "files", "mountPath": FOLDER}],
    }
    user = {"runAsNonRoot": True, "runAsUser": 65532, "fsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {
        **{"automountServiceAccountToken": False, "terminationGracePeriodSeconds": 0, "securityContext": user},
        **{"containers": [web], "volumes": [{"name": "files", "emptyDir": {}}]},
    }
    return {"metadata": {"name": NAME}, "spec": spec}
