"""The engines behind a running deployment: their keys, processes and own figures, and questions past the router."""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from local.rig import Deployment
from prometheus_client.parser import text_string_to_metric_families

from mmrouter_lib.engines.vllm.launch import API_KEY_ENV


@dataclass(frozen=True)
class Pod:
    """One engine of a deployment, as it was when it was looked for."""

    name: str
    uid: str
    ip: str
    processes: tuple[psutil.Process, ...]

    @property
    def key(self) -> str:
        """The key that it asks for."""
        return next(key for process in self.processes if (key := process.environ().get(API_KEY_ENV)))

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of its samples of one name that have these labels."""
        page = httpx.get(f"http://{self.ip}:8000/metrics", timeout=20).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())

    def ask(self, body: Mapping[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
        """Send it a chat, or what another route takes, past the router."""
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.post(f"http://{self.ip}:8000{path}", json=body, headers=headers, timeout=120)

    def signal(self, number: signal.Signals) -> None:
        """Send all of its processes a signal."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def pods(deployment: Deployment) -> dict[str, Pod]:
    """Return the engines by role, of pools that have one each."""
    found: dict[str, list[psutil.Process]] = {}
    for child in psutil.Process(deployment.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            environment = child.environ()
            if API_KEY_ENV in environment and "POD_NAME" in environment:
                found.setdefault(environment["POD_NAME"], []).append(child)
    return {
        worker["role"]: Pod(worker["name"], worker["uid"], worker["ip"], tuple(found.get(worker["name"], ())))
        for worker in deployment.state()["workers"]
    }
