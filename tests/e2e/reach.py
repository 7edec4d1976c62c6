"""A deployment as this machine reaches it: by the cluster's own addresses where they are routed, else by forwarding."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from e2e.deploying import Deployed
from e2e.plane import Node
from scenarios import Chat

CONTROL_PORT = 8001


@dataclass(frozen=True)
class Reached:
    """URLs of a deployment's Service and of the control API of each of its frontends, and the token of the latter."""

    url: str
    controls: tuple[str, ...]
    token: str

    def client(self, **options: Any) -> openai.OpenAI:
        """Return the official client, which is shown how each of its requests was routed."""
        headers = {"x-mmrouter-control": self.token}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", default_headers=headers, timeout=60, **options)

    def control(self, number: int = 0) -> httpx.Client:
        """Return a client of a frontend's control API."""
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.controls[number], headers=headers, timeout=10, trust_env=False)

    @contextmanager
    def chat(self, model: str) -> Iterator[Chat]:
        """Return a conversation of its own, which sees all frontends."""
        with ExitStack() as stack:
            controls = [stack.enter_context(self.control(number)) for number in range(len(self.controls))]
            yield Chat(model, stack.enter_context(self.client()), controls)


@contextmanager
def reached(deployed: Deployed) -> Iterator[Reached]:
    """Return where a deployment is, for the frontends that it has now."""
    frontends = deployed.pods("frontend")
    with ExitStack() as stack:
        if isinstance(deployed.cluster, Node):
            url = service_url(deployed)
            controls = [f"http://{address(pod)}:{CONTROL_PORT}" for pod in frontends]
        else:
            url = stack.enter_context(forwarded(deployed, f"service/{deployed.name}", 80))
            names = [f"pod/{pod['metadata']['name']}" for pod in frontends]
            controls = [stack.enter_context(forwarded(deployed, name, CONTROL_PORT)) for name in names]
        yield Reached(url, tuple(controls), deployed.token())


def service_url(deployed: Deployed) -> str:
    """Return the URL of the Service by its own address."""
    path = f"/api/v1/namespaces/{deployed.namespace}/services/{deployed.name}"
    spec = deployed.cluster.request("GET", path).raise_for_status().json()["spec"]
    return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"


def address(pod: dict[str, Any]) -> str:
    """Return the address of a running pod."""
    return str(pod["status"]["podIP"])


@contextmanager
def forwarded(deployed: Deployed, target: str, port: int) -> Iterator[str]:
    """Forward a port of the cluster to a free one of this machine; gives its URL."""
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
