"""Processes of a deployment that run the previous version of the packages, and their replacement by the other one."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from local.load import KeptConnections, ready
from local.rig import Deployment
from waiting import wait_for

SECONDS = 90
"""Bound of a process's start or end, on a busy machine."""
CHOOSE = """\
import os, pathlib, sys
here = pathlib.Path(__file__).parent
if version := (here / "version").read_text():
    sys.path.insert(0, version)
(here / str(os.getpid())).write_text(version)
"""
"""Python runs this module when it starts, so a process has the version that was chosen then, in later imports too."""


@dataclass(frozen=True)
class Versions:
    """Which version the processes of each role get when they start. ``folder``: an empty one, for all roles."""

    folder: Path
    previous: Path

    def choose(self, role: str, *, previous: bool) -> None:
        """Choose the version of the processes of a role (``router``, ``sidecar``) that start from now on."""
        chooser = self.folder / role
        chooser.mkdir(exist_ok=True)
        (chooser / "sitecustomize.py").write_text(CHOOSE)
        (chooser / "version").write_text(str(self.previous) if previous else "")

    def variables(self, role: str) -> list[dict[str, str]]:
        """Return the variables of a container by which its process reads the choice."""
        # A pod's /tmp is a volume, in whose folder paths that begin with /tmp lie; one with a dot is this machine's.
        return [
            {"name": "PYTHONPATH", "value": f"/.{self.folder / role}"},
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
        ]

    def apply(self, resource: dict[str, Any]) -> dict[str, Any]:
        """Return a resource whose routers and sidecars read the choice."""
        spec = resource["spec"]
        router = {"name": "router", "env": self.variables("router")}
        sidecar = {"name": "sidecar", "env": self.variables("sidecar")}
        spec["frontend"]["podTemplate"] = {"spec": {"containers": [router]}}
        for pool in spec["pools"]:
            pool["podTemplate"] = {"spec": {"initContainers": [sidecar]}}
        return resource

    def runs_previous(self, role: str, process: psutil.Process) -> bool:
        """Whether a process took the previous version when it started."""
        return (self.folder / role / str(process.pid)).read_text() != ""


def replace(deployment: Deployment, process: psutil.Process) -> None:
    """End a process and wait until its successor is Ready and every frontend has verified every worker again."""
    address = process.environ()["POD_IP"]
    process.send_signal(signal.SIGTERM)
    process.wait(SECONDS)
    wait_for(lambda: ready(address), SECONDS, f"the successor at {address} is Ready")
    wait_for(deployment.settled, SECONDS, "every frontend has verified every worker")


def replace_sidecars(deployment: Deployment) -> None:
    """Replace one sidecar after the other; the engines continue."""
    for _, process in sorted(deployment.processes("sidecar").items()):
        replace(deployment, process)


def replace_routers(deployment: Deployment, clients: KeptConnections) -> None:
    """Replace one router after the other as a rollout does: off the Service, terminated, and back when it is Ready."""
    for frontend in deployment.run["frontends"]:
        clients.service.remove(frontend["url"])
        replace(deployment, deployment.processes("router")[frontend["name"]])
        clients.service.append(frontend["url"])


def wrong_version(deployment: Deployment, versions: Versions, role: str, count: int, *, previous: bool) -> list[str]:
    """Return the pods of a role whose process runs the other version; a line about them where some are missing."""
    processes = deployment.processes(role)
    if len(processes) != count:
        return [f"{len(processes)} processes of {role}"]
    return [pod for pod, process in processes.items() if versions.runs_previous(role, process) != previous]
