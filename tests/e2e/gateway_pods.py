"""A gateway of the cluster, in pods: Istio's control plane, and a stock Envoy that it configures.

No image of either can be fetched. Their programs are this machine's, which pods of a node of our own mount, in a
container of the project's own image.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from chart.helm import NAMESPACE
from cluster.istio import GATEWAY, HTTP_PORT, MESH, SETTINGS, bootstrap, gateway_object, pilot_options, proxy_service
from cluster.resources import binding
from e2e.deploying import example, run_pod
from e2e.node import Node
from e2e.report import dump
from waiting import answers_ok

ADMIN_PORT, LISTENING_PORT = 15000, 8080
PROGRAMS = "/programs"
ADDRESS = "$(ADDRESS)"
"""In a container's arguments: the address of its pod."""
OPERATOR_SECONDS = 120


@contextmanager
def definitions(cluster: Node, folder: Path) -> Iterator[None]:
    """Serve the definitions of a folder until the block ends, and restart the operator, which looks for changes of
    them every two minutes.
    """
    cluster.apply_crds(folder)
    restart_operator(cluster)
    try:
        yield
    finally:
        # An operator that starts while they go waits for their objects until it looks again.
        cluster.kubectl("delete", f"--timeout={OPERATOR_SECONDS}s", "-f", folder)
        restart_operator(cluster)


def restart_operator(cluster: Node) -> None:
    for command in (("restart",), ("status", f"--timeout={OPERATOR_SECONDS}s")):
        done = cluster.kubectl("-n", NAMESPACE, "rollout", command[0], "deploy/mmrouter-operator", *command[1:])
        assert done.returncode == 0, done.stderr + dump(cluster, NAMESPACE)


@contextmanager
def administration(cluster: Node) -> Iterator[str]:
    """Give a namespace whose pods have every right in the cluster, until the block ends."""
    with cluster.namespace() as namespace:
        account = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
        bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
        body = {**binding("ClusterRole", "cluster-admin", account), "metadata": {"name": namespace}}
        cluster.request("POST", bindings, body).raise_for_status()
        try:
            yield namespace
        finally:
            cluster.request("DELETE", f"{bindings}/{namespace}")


@contextmanager
def pilot(cluster: Node, program: Path) -> Iterator[str]:
    """Run Istio's control plane in a namespace of its own until the block ends; gives its pod's address."""
    with administration(cluster) as namespace:
        options = " ".join(pilot_options("0.0.0.0", namespace, Path("/tmp/mesh.yaml")))
        command = f"echo '{MESH}' >/tmp/mesh.yaml && exec {PROGRAMS}/{program.name} {options}"
        settings = {**SETTINGS, "POD_NAMESPACE": namespace}
        yield run_pod(cluster, namespace, pod("pilot", program, ("sh", "-c", command), HTTP_PORT, settings))


@dataclass(frozen=True)
class Gateway:
    """A Gateway of the cluster. ``url``: of the Service of its proxy."""

    namespace: str
    url: str

    def serves(self) -> bool:
        return answers_ok(f"{self.url}/v1/models")

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, trust_env=False)


@contextmanager
def gateway(cluster: Node, pilot: str, envoy: Path) -> Iterator[Gateway]:
    """Run a Gateway for routes of every namespace, in a namespace of its own, until the block ends."""
    with cluster.namespace() as namespace:
        apply(cluster, namespace, gateway_object(allowedRoutes={"namespaces": {"from": "All"}}))
        yield Gateway(namespace, run_proxy(cluster, namespace, pilot, envoy))


def run_proxy(cluster: Node, namespace: str, pilot: str, envoy: Path, gateway: str = GATEWAY) -> str:
    """Run the proxy of a Gateway; return the URL of its Service."""
    service = proxy_service(LISTENING_PORT, gateway)
    apply(cluster, namespace, service)
    admin = {"socket_address": {"address": "0.0.0.0", "port_value": ADMIN_PORT}}
    config = json.dumps(bootstrap(pilot, ADDRESS, namespace, admin, gateway))
    options = ("--disable-hot-restart", "--log-level", "warn", "--concurrency", "2", "--config-yaml", config)
    command = (f"{PROGRAMS}/{envoy.name}", *options)
    name, labels = service["metadata"]["name"], service["metadata"]["labels"]
    run_pod(cluster, namespace, pod(name, envoy, command, ADMIN_PORT, {}, labels))
    made = cluster.read(f"/api/v1/namespaces/{namespace}/services/{name}")
    return f"http://{made['spec']['clusterIP']}"


def apply(cluster: Node, namespace: str, body: dict[str, Any]) -> None:
    done = cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(body))
    assert done.returncode == 0, done.stderr


def pod(
    name: str,
    program: Path,
    command: Sequence[str],
    port: int,
    settings: Mapping[str, str],
    labels: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a pod with the folder of ``program`` at :data:`PROGRAMS`, which is Ready when its port says so."""
    address = {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container = {
        **{"name": name, "image": example()["spec"]["engine"]["image"], "command": list(command)},
        "env": [address, *({"name": each, "value": value} for each, value in settings.items())],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": port}, "periodSeconds": 1},
        "volumeMounts": [{"name": "programs", "mountPath": PROGRAMS, "readOnly": True}],
    }
    volume = {"name": "programs", "hostPath": {"path": str(program.parent), "type": "Directory"}}
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container], "volumes": [volume]}
    return {"metadata": {"name": name, "labels": dict(labels or {})}, "spec": spec}
