"""A whole deployment as local processes, started by the command that a user types."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 90
MEDIA = {"fetch": "allowList", "allowedHosts": ["127.0.0.1"], "allowedCIDRs": ["127.0.0.0/8"]}
"""Frontends fetch images from this machine."""


@dataclass
class Deployment:
    """A running ``mmrouter up``."""

    process: subprocess.Popen[str]
    run: dict[str, Any]
    folder: Path
    log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return str(self.run["endpoint"])

    @property
    def token(self) -> str:
        return Path(self.run["control_token"]).read_text().strip()

    @property
    def secrets(self) -> Path:
        """Folder of the deployment's keys; the resource is beside it, as ``deployment.json``."""
        return Path(self.run["control_token"]).parent

    @property
    def frontends(self) -> list[dict[str, str]]:
        """Return ``name``, ``url`` and ``control`` of each frontend."""
        return list(self.run["frontends"])

    @property
    def controls(self) -> list[str]:
        return [frontend["control"] for frontend in self.frontends]

    def client(self, **options: Any) -> openai.OpenAI:
        headers = {"x-mmrouter-control": self.token}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", default_headers=headers, timeout=60, **options)

    def control(self, number: int = 0) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.controls[number], headers=headers, timeout=10)

    def ask(self, path: str, number: int = 0) -> dict[str, Any]:
        with self.control(number) as client:
            answer: dict[str, Any] = client.get(path).raise_for_status().json()
            return answer

    def state(self, number: int = 0) -> dict[str, Any]:
        return self.ask("/control/state", number)

    def workers(self, role: str, number: int = 0) -> list[dict[str, Any]]:
        return [worker for worker in self.state(number)["workers"] if worker["role"] == role]

    def keys(self, uid: str, number: int = 0) -> dict[str, Any]:
        return self.ask(f"/control/workers/{uid}/keys", number)

    def decision(self, response: Any) -> dict[str, Any]:
        """Return the router's decision for a response that still has its headers."""
        return self.ask(f"/control/decisions/{response.headers['x-mmrouter-request-id']}")

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over the frontends."""
        return sum(metric(str(httpx.URL(url).host), name, **labels) for url in self.controls)

    def processes(self, command: str) -> dict[str, psutil.Process]:
        """Pod name -> process, for ``router``, ``sidecar`` or ``vllm``."""
        return pod_processes(self.process.pid, command)

    def settled(self) -> bool:
        """Every frontend sees every worker verified."""
        try:
            states = [self.state(number) for number in range(len(self.controls))]
        except (httpx.HTTPError, ValueError):
            return False
        workers = [worker for state in states for worker in state["workers"]]
        # A sidecar that has just died is believed for two seconds; only a fresh heartbeat shows that it lives.
        fresh = [worker["heard_seconds_ago"] is not None and worker["heard_seconds_ago"] < 0.7 for worker in workers]
        return bool(workers) and all(fresh) and {worker["standing"] for worker in workers} == {"verified"}

    def assert_gate_passes(self, *options: str) -> None:
        """``mmrouter verify`` finds that what was predicted is what the engines did."""
        done = self.mmrouter("verify", *options, self.url)
        assert done.returncode == 0, done.stdout + done.stderr

    def mmrouter(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mmrouter_cli", *arguments], capture_output=True, text=True, timeout=600, cwd=ROOT
        )


def pod_processes(pid: int, command: str) -> dict[str, psutil.Process]:
    """Return the processes of a command below a process: pod name -> process."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if command in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found[child.environ()["POD_NAME"]] = child
        except (psutil.NoSuchProcess, KeyError):
            continue
    return found


@contextmanager
def running(file: Path, *options: str, start_seconds: float = START_SECONDS) -> Iterator[Deployment]:
    """``mmrouter up FILE`` in the background until the block ends; leaves by SIGINT, as ctrl-C does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mmrouter_cli", "up", str(file), "--verbose", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    log: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        log.extend(iter(process.stdout.readline, ""))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        try:
            wait_for(
                lambda: process.poll() is not None or any(line.startswith("ready ") for line in log),
                start_seconds,
                "ready",
            )
        except TimeoutError:
            print("".join(log[-200:]))  # what pytest shows of a test that failed
            raise
        assert process.poll() is None, "".join(log[-60:])
        from mmrouter_cli.local.folders import run_root

        folder = next(p for p in run_root().glob("*/run.json") if json.loads(p.read_text())["pid"] == process.pid)
        yield Deployment(process, json.loads(folder.read_text()), folder.parent, log)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        reader.join(5)


def example(name: str = "demo.yaml") -> dict[str, Any]:
    """Return an example's resource, to be changed and run from another folder."""
    resource: dict[str, Any] = yaml.safe_load((ROOT / "examples" / name).read_text())
    resource["spec"]["model"]["volume"]["hostPath"]["path"] = str(ROOT / "examples" / "models" / "tiny-qwen2-vl")
    return resource


def deployed(
    folder: Path, *documents: dict[str, Any], options: Sequence[str] = (), start_seconds: float = START_SECONDS
) -> AbstractContextManager[Deployment]:
    """``mmrouter up`` with these documents as its file."""
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    return running(file, *options, start_seconds=start_seconds)


def staged(name: str, folder: Path, **routing: Any) -> AbstractContextManager[Deployment]:
    """Run an example whose engines work in stages with one frontend, which fetches images from this machine."""
    resource = example(name)
    resource["spec"]["frontend"]["replicas"] = 1
    resource["spec"]["routing"] = {**routing, "media": MEDIA}
    return deployed(folder, resource)


def samples(ip: str, name: str, port: int = 9090) -> Iterator[Any]:
    """Yield a metric's samples."""
    page = httpx.get(f"http://{ip}:{port}/metrics", timeout=10).raise_for_status().text
    for family in text_string_to_metric_families(page):
        yield from (sample for sample in family.samples if sample.name == name)


def metric(ip: str, name: str, port: int = 9090, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels."""
    return sum(each.value for each in samples(ip, name, port) if labels.items() <= each.labels.items())
