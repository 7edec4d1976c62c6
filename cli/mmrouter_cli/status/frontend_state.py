"""Reads `/control/state` of a deployment's frontends, directly or through a port that kubectl forwards.

Inside the cluster, and for pods at loopback addresses, the pod's address is used. From anywhere else kubectl forwards a
port, because a pod's address may be another machine there, which must not get the token.
"""

import asyncio
import ipaddress
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

CONTROL_PORT = 8001
NOT_RUNNING = "its pod does not run"
ANSWER_SECONDS = 3.0
FORWARD_SECONDS = 8.0

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a value that could not be read; ``why`` is a sentence."""

    why: str


@dataclass(frozen=True, slots=True)
class Frontend:
    """A frontend's display name, and the URL of its control API or why it has none."""

    name: str
    url: str | Unread


async def fetch(client: httpx.AsyncClient, frontend: Frontend) -> State | Unread:
    """Return a frontend's state; ``client`` carries the control token."""
    if isinstance(frontend.url, Unread):
        return frontend.url
    try:
        answer = await client.get(f"{frontend.url}/control/state")
        if answer.status_code == 401:
            return Unread("it rejects the control token")
        answer.raise_for_status()
        state = answer.json()
    except httpx.HTTPStatusError as error:
        return Unread(f"it answered {error.response.status_code}")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Unread(str(error) or type(error).__name__)
    except ValueError:
        return Unread("its answer is not JSON")
    if not isinstance(state, dict) or not isinstance(state.get("workers"), list):
        return Unread("its answer is not the state of a frontend")
    return state


def client(token: str) -> httpx.AsyncClient:
    """Return a client for control APIs, without proxies; the caller closes it."""
    headers = {"authorization": f"Bearer {token}"}
    return httpx.AsyncClient(timeout=ANSWER_SECONDS, headers=headers, trust_env=False)


@asynccontextmanager
async def open_frontends(pods: Sequence[Mapping[str, Any]], kubeconfig: Path | None) -> AsyncIterator[list[Frontend]]:
    """Make each of these frontend pods reachable; forwarded ports are closed after the block."""
    forwards: list[asyncio.subprocess.Process] = []
    try:
        yield list(await asyncio.gather(*(_open(pod, kubeconfig, forwards) for pod in pods)))
    finally:
        for process in forwards:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _open(
    pod: Mapping[str, Any], kubeconfig: Path | None, forwards: list[asyncio.subprocess.Process]
) -> Frontend:
    name, ip = pod["metadata"]["name"], (pod.get("status") or {}).get("podIP", "")
    # A pod with a failing init container has an address without a listener.
    if not ip or (pod.get("status") or {}).get("phase") != "Running":
        return Frontend(name, Unread(NOT_RUNNING))
    if "KUBERNETES_SERVICE_HOST" in os.environ or ipaddress.ip_address(ip).is_loopback:
        host = f"[{ip}]" if ":" in ip else ip
        return Frontend(name, f"http://{host}:{CONTROL_PORT}")
    return Frontend(name, await _forward(name, pod["metadata"]["namespace"], kubeconfig, forwards))


async def _forward(
    pod: str, namespace: str, kubeconfig: Path | None, forwards: list[asyncio.subprocess.Process]
) -> str | Unread:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return Unread("its pod's address is not reachable from here, and there is no kubectl to forward a port")
    argv = [kubectl, *([f"--kubeconfig={kubeconfig}"] if kubeconfig is not None else [])]
    argv += ["port-forward", f"--namespace={namespace}", f"pod/{pod}", f":{CONTROL_PORT}"]
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    forwards.append(process)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(FORWARD_SECONDS):
            line = (await process.stdout.readline()).decode()
            # "Forwarding from 127.0.0.1:40123 -> 8001"
            if " -> " in line:
                return f"http://{line.partition(' from ')[2].partition(' -> ')[0]}"
            errors = (await process.stderr.read()).decode().strip()
    except TimeoutError:
        return Unread(f"kubectl forwarded no port within {FORWARD_SECONDS:g} s")
    return Unread(f"kubectl cannot forward a port: {errors.splitlines()[-1] if errors else 'no message'}")
