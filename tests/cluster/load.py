"""Clients of a deployment: requests all the time, each to a ready frontend. What a test reports that waited in vain."""

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
from cluster.resources import MARK, Object, get, status

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


def pods(plane: ControlPlane, namespace: str, **labels: str) -> list[dict[str, Any]]:
    """Return the pods of a namespace with these labels of ours (``role="worker"``)."""
    selector = ",".join(f"mmrouter.io/{name}={value}" for name, value in labels.items())
    page = plane.request("GET", f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector).raise_for_status()
    found: list[dict[str, Any]] = page.json()["items"]
    return found


@contextmanager
def load(plane: ControlPlane, namespace: str, model: str) -> Iterator[Load]:
    """Send requests until the block ends: a few prompts with a picture, again and again. ``model`` is the deployment's
    name, too.
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


CONTROL_PORT = 8001
LOG_LINES = 40
LINE = 200
SHORT = {"mmrouter.io/routable": "routable", "mmrouter.io/verified": "verified"}


def describe(plane: ControlPlane, namespace: str, name: str = "demo", operator: str = "operator") -> str:
    """Return its pods, what every frontend says of every engine, its conditions and the end of the operator's log."""
    here = pods(plane, namespace, deployment=name)
    fronts = [pod for pod in here if pod["metadata"]["labels"]["mmrouter.io/role"] == "frontend"]
    conditions = status(plane, namespace, name).get("conditions") or []
    lines = [
        "pods:",
        *(_pod(pod) for pod in here),
        "frontends:",
        *(line for front in fronts for line in _said(front, _token(plane, namespace, name))),
        "conditions:",
        *(f"  {one['type']}={one['status']} {one['reason']}: {one['message']}" for one in conditions),
        f"the last lines of {operator}.log:",
        *(f"  {line}" for line in plane.log_file(operator).read_text().splitlines()[-LOG_LINES:]),
    ]
    return "\n".join(line[:LINE].rstrip() for line in lines)


def _pod(pod: Mapping[str, Any]) -> str:
    metadata, now = pod["metadata"], pod["status"]
    mark = (metadata.get("annotations") or {}).get(MARK, "")
    going = " DELETED" if "deletionTimestamp" in metadata else ""
    conditions = " ".join(
        f"{SHORT.get(one['type'], one['type'])}={one['status']}"
        + ("" if one["status"] == "True" else f"({one.get('reason', '')})")
        for one in now.get("conditions") or []
        if one["type"] in {*SHORT, "Initialized", "ContainersReady", "Ready"}
    )
    containers = " ".join(
        f"{one['name']}:{'ready' if one['ready'] else next(iter(one['state']), '?')}"
        + (f"({one['restartCount']} restarts)" if one["restartCount"] else "")
        for one in (*(now.get("initContainerStatuses") or []), *(now.get("containerStatuses") or []))
    )
    return f"  {metadata['name']} mark {mark}{going} {now.get('phase', '')} {conditions} | {containers}"


def _said(front: Mapping[str, Any], token: str) -> list[str]:
    name = front["metadata"]["name"]
    try:
        url = f"http://{front['status'].get('podIP', '')}:{CONTROL_PORT}/control/state"
        answer = httpx.get(url, headers={"authorization": f"Bearer {token}"}, timeout=5, trust_env=False)
        state = answer.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return [f"  {name}: {error!r}"]
    return [f"  {name}: ready {state['ready']}", *(f"    {_engine(one)}" for one in state["workers"])]


def _engine(one: Mapping[str, Any]) -> str:
    return (
        f"{one['name']} {one['standing']}, routable {one['routable']}, verified {one.get('verified')},"
        f" admitted {one['admitted']}, synced {one['synced']} at {one['seq']}, heard {one['heard_seconds_ago']} s ago,"
        f" engine {one['engine_state']}, {one['in_flight']} in flight {one.get('cause', '')} {one.get('message', '')}"
    )


def _token(plane: ControlPlane, namespace: str, name: str) -> str:
    found: Object | None = get(plane, "Secret", namespace, f"{name}-secrets")
    return base64.b64decode(found["data"]["control.token"]).decode() if found else ""
