"""Clients of a deployment: requests all the time, each to a ready frontend. What a test reports that waited in vain."""

import base64
import itertools
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from cluster.controlplane import ControlPlane
from cluster.operators import mmrouter
from waiting import repeating

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
    conditions = pod["status"].get("conditions") or []
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


@contextmanager
def load(plane: ControlPlane, namespace: str, model: str) -> Iterator[Load]:
    """Send requests until the block ends: a few prompts with a picture, again and again. ``model`` is the deployment's
    name, too.
    """
    seen = Load()
    data = plane.read(f"/api/v1/namespaces/{namespace}/secrets/{model}-secrets")["data"]
    # With the token the router's answers say how exactly it predicted.
    headers = {"x-mmrouter-control": base64.b64decode(data["control.token"]).decode()}
    image = {"type": "image_url", "image_url": {"url": data_uri(picture(secrets.token_hex(4)))}}
    prompts = [
        [{"role": "user", "content": [{"type": "text", "text": f"{number} {TEXT}"}, image]}] for number in range(4)
    ]
    numbers = itertools.count()

    def send() -> None:
        number = next(numbers)
        frontends = plane.pods(namespace, deployment=model, role="frontend")
        ready = [pod["status"]["podIP"] for pod in frontends if is_ready(pod)]
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

    with repeating(send, PAUSE_SECONDS):
        yield seen


LOG_LINES = 40


def describe(plane: ControlPlane, namespace: str) -> str:
    """Return what `mmrouter doctor` and `mmrouter status` say of ``demo``, and the end of the operator's log."""
    outputs = [mmrouter(plane, command, "demo", "-n", namespace) for command in ("doctor", "status")]
    log = plane.log_file("operator").read_text().splitlines()[-LOG_LINES:]
    return "\n".join([*(done.stdout + done.stderr for done in outputs), *log])
