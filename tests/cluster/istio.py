"""Istio's control plane as a process, and a stock Envoy that it configures as the proxy of a Gateway.

Istio's own proxy is a fork of Envoy. Stock Envoy does without it where pilot leaves out the filters that only the fork
has: metadata exchange and ALPN.
"""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster.controlplane import ControlPlane, end
from e2e.network import free_numbers
from waiting import answers_ok, wait_for

XDS_PORT, HTTP_PORT, MONITORING_PORT, DEBUG_PORT = 15010, 15080, 15014, 15876
SYSTEM = "istio-system"
GATEWAY = "public"
MESH = "enableAutoMtls: false"  # the proxy would wait for certificates, which an agent brings
VERSION = "1.31.0"
SETTINGS = {
    "ENABLE_GATEWAY_API_INFERENCE_EXTENSION": "true",
    "PILOT_ENABLE_ALPN_FILTER": "false",
    "PILOT_ENABLE_METADATA_EXCHANGE": "false",
    "PILOT_ENABLE_GATEWAY_API_DEPLOYMENT_CONTROLLER": "false",  # the tests start the proxy
    "ENABLE_CA_SERVER": "false",
    "POD_NAMESPACE": SYSTEM,
    "POD_NAME": "istiod",
}
HOLD = 'ip route add local "$0" dev lo || exit; echo; read -r _; ip route delete local "$0" dev lo'
"""Removes the route at the end of its input, which comes however the test run ends."""


@contextmanager
def local_network() -> Iterator[str]:
    """Make a network ``10.N.0.0/16`` local to this machine until the block ends, and return its begin, ``10.N``.

    Gateways read the pods' addresses from EndpointSlices, which may not have loopback addresses. Skips the test where
    this process may not change routes.
    """
    for number in free_numbers():
        command = ["sh", "-c", HOLD, f"10.{number}.0.0/16"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as holder:
            assert holder.stdout
            if not (error := holder.stdout.readline().strip()):
                yield f"10.{number}"
                return
        if "File exists" not in error:  # another process was faster
            pytest.skip(f"not run: this process may not make addresses local: {error}")
    raise RuntimeError("no network is free")


class Istio:
    """A running pilot; :func:`istio` makes and ends it."""

    def __init__(self, plane: ControlPlane, program: Path) -> None:
        self.plane, self.address = plane, plane.address
        mesh = plane.folder / "mesh.yaml"
        mesh.write_text(MESH)
        argv = [program, *pilot_options(self.address, SYSTEM, mesh), f"--kubeconfig={plane.kubeconfig}"]
        self.process = plane.spawn("istiod", argv, {**os.environ, **SETTINGS})

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log()
        return answers_ok(f"http://{self.address}:{HTTP_PORT}/ready")

    def log(self) -> str:
        return self.plane.log_file("istiod").read_text()[-6000:]

    @contextmanager
    def gateway(self, envoy: str, namespace: str) -> Iterator[str]:
        """Run the Gateway :data:`GATEWAY` of a namespace, with Envoy as its proxy, and return its URL."""
        port = free_port()
        for body in (gateway_object(), proxy_service(port)):
            done = self.plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(body))
            assert done.returncode == 0, done.stderr
        admin = {"pipe": {"path": str(self.plane.folder / f"{namespace}.envoy")}}
        file = self.plane.folder / f"{namespace}.envoy.json"
        file.write_text(json.dumps(bootstrap(self.address, self.address, namespace, admin)))
        argv = [envoy, "-c", file, "--disable-hot-restart", "--log-level", "warn", "--concurrency", "2"]
        process = self.plane.spawn(f"envoy-{namespace}", argv)
        try:
            yield f"http://{self.address}:{port}"
        finally:
            end(process)


def pilot_options(address: str, namespace: str, mesh: Path) -> list[str]:
    """Return the arguments of pilot's program. ``address``: where it listens; ``mesh``: the file with :data:`MESH`."""
    return [
        *("discovery", f"--namespace={namespace}", f"--meshConfig={mesh}"),
        *(f"--grpcAddr={address}:{XDS_PORT}", "--secureGRPCAddr=", "--httpsAddr="),
        *(f"--httpAddr={address}:{HTTP_PORT}", f"--monitoringAddr={address}:{MONITORING_PORT}"),
        *(f"--ctrlz_address={address}", f"--ctrlz_port={DEBUG_PORT}"),
    ]


def gateway_object(**listener: Any) -> dict[str, Any]:
    """Return the Gateway :data:`GATEWAY`. ``listener``: further fields of its listener."""
    listeners = [{"name": "http", "port": 80, "protocol": "HTTP", **listener}]
    return {
        **{"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": {"name": GATEWAY}},
        "spec": {"gatewayClassName": "istio", "listeners": listeners},
    }


def proxy_service(port: int, gateway: str = GATEWAY) -> dict[str, Any]:
    """Return the Service of a Gateway's proxy, with the labels of its pods. ``port``: where the proxy listens."""
    labels = {"gateway.networking.k8s.io/gateway-name": gateway}
    spec = {"selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": port}]}
    return {
        **{"apiVersion": "v1", "kind": "Service", "spec": spec},
        "metadata": {"name": f"{gateway}-istio", "labels": labels},
    }


def bootstrap(
    pilot: str, address: str, namespace: str, admin: dict[str, Any], gateway: str = GATEWAY
) -> dict[str, Any]:
    """Return Envoy's own configuration: who it is, and that pilot has the rest. ``pilot``, ``address``: of both, and
    ``admin`` of Envoy's admin interface.
    """
    metadata = proxy_service(0, gateway)["metadata"]
    service, labels = metadata["name"], metadata["labels"]
    xds = {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"}
    http2 = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    endpoint = {"address": {"socket_address": {"address": pilot, "port_value": XDS_PORT}}}
    return {
        "node": {
            "id": f"router~{address}~{service}-0.{namespace}~{namespace}.svc.cluster.local",
            "cluster": f"{service}.{namespace}",
            "metadata": {
                "NAMESPACE": namespace,
                "LABELS": labels,
                "CLUSTER_ID": "Kubernetes",
                "INSTANCE_IPS": address,
                "SERVICE_ACCOUNT": "default",
                "ISTIO_VERSION": VERSION,
            },
        },
        "admin": {"address": admin},
        "dynamic_resources": {
            "lds_config": xds,
            "cds_config": xds,
            "ads_config": {
                "api_type": "GRPC",
                "transport_api_version": "V3",
                "grpc_services": [{"envoy_grpc": {"cluster_name": "pilot"}}],
            },
        },
        "static_resources": {
            "clusters": [
                {
                    "name": "pilot",
                    "type": "STATIC",
                    "connect_timeout": "2s",
                    "typed_extension_protocol_options": {http2["@type"].rpartition("/")[2]: http2},
                    "load_assignment": {
                        "cluster_name": "pilot",
                        "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
                    },
                }
            ]
        },
    }


def free_port() -> int:
    """Return a port that is free on every address: pilot has a Gateway's proxy listen on all of them."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


@contextmanager
def istio(plane: ControlPlane, programs: Path) -> Iterator[Istio]:
    """Run pilot until the block ends. The definitions of ``programs`` must be served already."""
    done = plane.kubectl("create", "namespace", SYSTEM)
    assert done.returncode == 0, done.stderr
    running = Istio(plane, programs / "pilot-discovery")
    try:
        wait_for(running.ready, 60, "pilot is ready", known=running.log)
        yield running
    finally:
        end(running.process)
