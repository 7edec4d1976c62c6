import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest

from mmrouter_cli.local.cluster import LocalCluster, run_local

SERVER = Path(__file__).parent / "server.py"


@dataclass
class Log:
    """A sink that remembers."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, source: str, line: str) -> None:
        self.lines.append((source, line))

    def of(self, source: str) -> list[str]:
        return [line for who, line in self.lines if who == source]


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture(autouse=True)
def root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run root of this test's own: whatever stands in it afterwards was left behind."""
    folder = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def container(name: str, *args: str, **more: Any) -> dict[str, Any]:
    """A container that runs ``server.py`` with arguments."""
    return {
        "name": name,
        "command": [sys.executable, "-S", "-E", str(SERVER)],
        "args": list(args),
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}, *more.pop("env", [])],
        **more,
    }


def server(name: str = "web", port: int = 8800, **more: Any) -> dict[str, Any]:
    """An HTTP server that is ready once it answers."""
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 5}
    ports = [{"name": "http", "containerPort": port}]
    return container(name, "$(POD_IP)", str(port), **{"ports": ports, "readinessProbe": probe, **more})


def deployment(name: str, *containers: dict[str, Any], replicas: int = 1, **more: Any) -> dict[str, Any]:
    labels = more.pop("labels", {"app": name})
    template = {"metadata": {"labels": labels}, "spec": {"containers": list(containers), **more}}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    metadata = {"name": name, "namespace": "here"}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def service(name: str, port: int = 8801, target: int | str = "http", **selector: str) -> dict[str, Any]:
    spec = {"selector": selector or {"app": name}, "ports": [{"port": port, "targetPort": target}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def kit() -> SimpleNamespace:
    """What the tests build objects with."""
    return SimpleNamespace(container=container, server=server, deployment=deployment, service=service)


async def ask(url: str) -> dict[str, Any]:
    """Return the answer of a ``server.py``, over a connection of its own."""
    async with aiohttp.ClientSession() as session, session.get(url, headers={"connection": "close"}) as answer:
        found: dict[str, Any] = json.loads(await answer.read())
        return found


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may go between any two looks
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


Run = Callable[..., AbstractAsyncContextManager[LocalCluster]]


@pytest.fixture
def run(log: Log, tmp_path: Path) -> Run:
    """Run objects; by default wait until they are ready."""

    @asynccontextmanager
    async def start(*objects: dict[str, Any], ready: bool = True, **options: Any) -> AsyncIterator[LocalCluster]:
        async with run_local(objects, base_dir=tmp_path, log=log, **options) as cluster:
            if ready:
                await cluster.wait_ready(10)
            yield cluster

    return start
