"""Clients of a deployment: requests all the time, each to a ready frontend, on a connection of its own."""

import base64
import itertools
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from cluster.controlplane import ControlPlane

from mmrouter_cli.sample_images import data_uri, picture

PAUSE_SECONDS = 0.1
PORT = 8000
TEXT = "The harbour lies still in the early light and the boats wait for the tide to turn. " * 4


@dataclass
class Load:
    """What became of the requests so far. ``failures`` says of each that was not answered why."""

    answered: int = 0
    exact: int = 0
    failures: list[str] = field(default_factory=list)


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a Service would send requests to a pod."""
    conditions = pod["status"].get("conditions") or []
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def pods(plane: ControlPlane, namespace: str, **labels: str) -> list[dict[str, Any]]:
    """Return the pods of a namespace with these labels of ours (``role="worker"``)."""
    selector = ",".join(f"mmrouter.io/{name}={value}" for name, value in labels.items())
    page = plane.request("GET", f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector).raise_for_status()
    found: list[dict[str, Any]] = page.json()["items"]
    return found


@contextmanager
def load(plane: ControlPlane, namespace: str, model: str) -> Iterator[Load]:
    """Send requests until the block ends: a few prompts with a picture, again and again.

    ``model`` is the deployment's name, too.
    """
    seen = Load()
    data = (
        plane.request("GET", f"/api/v1/namespaces/{namespace}/secrets/{model}-secrets")
        .raise_for_status()
        .json()["data"]
    )
    # With the token the router's answers say how exactly it predicted.
    headers = {"x-mmrouter-control": base64.b64decode(data["control.token"]).decode()}
    stop = threading.Event()
    image = {"type": "image_url", "image_url": {"url": data_uri(picture(secrets.token_hex(4)))}}
    prompts = [
        [{"role": "user", "content": [{"type": "text", "text": f"{number} {TEXT}"}, image]}] for number in range(4)
    ]

    def send(number: int) -> None:
        ready = [
            pod["status"]["podIP"] for pod in pods(plane, namespace, deployment=model, role="frontend") if is_ready(pod)
        ]
        if not ready:
            seen.failures.append("no frontend is ready")
            return
        body = {"model": model, "max_tokens": 2, "messages": prompts[number % len(prompts)]}
        url = f"http://{ready[number % len(ready)]}:{PORT}/v1/chat/completions"
        try:
            answer = httpx.post(url, json=body, headers=headers, timeout=30, trust_env=False)
        except httpx.HTTPError as error:
            seen.failures.append(f"{url}: {error!r}")
            return
        if answer.is_success:
            seen.answered += 1
            seen.exact += answer.headers.get("x-mmrouter-exactness") == "exact"
        else:
            seen.failures.append(f"{url}: {answer.status_code} {answer.text[:200]}")

    def run() -> None:
        for number in itertools.count():
            if stop.wait(PAUSE_SECONDS):
                return
            send(number)

    thread = threading.Thread(target=run, name="load")
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
