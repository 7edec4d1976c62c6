"""A deployment of a real control plane, whose pods are processes of this machine: it can be changed while it runs."""

import base64
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from artefacts import NotMadeError, run_tool
from campaign.faults.observation import Frontend
from cluster.controlplane import ControlPlane, control_plane
from cluster.hollow_kubelet import hollow
from cluster.load import is_ready
from cluster.operators import operator
from cluster.resources import get
from cluster.runner import LocalRunner
from local.rig import pod_processes

from mmrouter_lib.api import parse_deployment, to_json
from mmrouter_operator.model.kinds import RESOURCE

ROOT = Path(__file__).resolve().parents[3]
PORT, CONTROL_PORT = 8000, 8001


def missing_programs() -> str:
    """Make the programs of a control plane where they are not there yet; return what this machine lacks for them."""
    try:
        run_tool("cluster.go_programs", "kubernetes", live=True)
    except NotMadeError as error:
        return f"{error}"
    return ""


@contextmanager
def running_cluster(folder: Path) -> Iterator[ControlPlane]:
    """Run a control plane, an operator and one node, whose pods are processes, until the block ends."""
    programs = Path(run_tool("cluster.go_programs", "kubernetes"))
    with (
        control_plane(folder, programs, ROOT / "crds") as plane,
        hollow(plane, LocalRunner(plane, ROOT / "examples")) as kubelet,
        operator(plane),
    ):
        kubelet.node("local")
        yield plane


@dataclass(frozen=True)
class ClusterPods:
    """The pods of the deployment ``demo`` of a namespace. ``folder``: a new one, for its keys."""

    plane: ControlPlane
    namespace: str
    folder: Path

    @property
    def secrets(self) -> Path:
        return self.folder / "secrets"

    def write(self) -> None:
        """Write the keys and the resource as a frontend has them. Raises ``httpx.HTTPStatusError``."""
        self.secrets.mkdir(parents=True)
        for name, value in get(self.plane, "Secret", self.namespace, "demo-secrets")["data"].items():
            (self.secrets / name).write_bytes(base64.b64decode(value))
        resource = to_json(parse_deployment(get(self.plane, RESOURCE, self.namespace, "demo")))
        (self.folder / "deployment.json").write_text(json.dumps(resource))

    def pods(self, role: str) -> list[dict[str, Any]]:
        """Return the pods of a role (``frontend``, ``worker``), also those that end."""
        return self.plane.pods(self.namespace, deployment="demo", role=role)

    @property
    def frontends(self) -> Sequence[Frontend]:
        return [
            {"name": pod["metadata"]["name"], "control": f"http://{pod['status']['podIP']}:{CONTROL_PORT}"}
            for pod in self.pods("frontend")
            if is_ready(pod)
        ]

    def processes(self, command: str) -> dict[str, psutil.Process]:
        return pod_processes(os.getpid(), command)

    def endpoints(self) -> Callable[[], list[tuple[str, int]]]:
        """Return what reads the addresses of the Service; it returns the last ones while the API server is away.

        They are not those of its EndpointSlices, as the API server refuses loopback addresses there.
        """
        known: list[tuple[str, int]] = []

        def read() -> list[tuple[str, int]]:
            nonlocal known
            with suppress(httpx.HTTPError):
                known = [(str(httpx.URL(frontend["control"]).host), PORT) for frontend in self.frontends]
            return known

        return read
