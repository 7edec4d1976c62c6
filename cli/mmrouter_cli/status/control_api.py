"""Finds a deployment's control API and its token, and reads `/control/state` of its frontends.

From the URL of an endpoint: a running ``mmrouter up`` has a ``run.json`` in its run folder, and a frontend's own pod
has a control port and its token; elsewhere ``--control`` and ``--token`` (or ``MMROUTER_CONTROL_TOKEN``) are needed.

On a cluster: inside it, and for pods at loopback addresses, the pod's address is used. From anywhere else kubectl
forwards a port, because a pod's address may be another machine there, which must not get the token.
"""

import asyncio
import ipaddress
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from mmrouter_cli.local.folders import network_namespace, run_root
from mmrouter_lib.pod_paths import CONFIG_DIR

CONTROL_PORT = 8001


class UnreachableError(Exception):
    """The control API is unknown; the message says which options to give."""


@dataclass(frozen=True, slots=True)
class ControlEndpoint:
    """A deployment's endpoint for clients, the control API of every frontend, and its token.

    ``is_local``: its pods are processes of a ``mmrouter up`` on this machine.
    """

    url: str
    controls: tuple[str, ...]
    token: str
    is_local: bool = False

    @property
    def authorization(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}


def with_scheme(url: str) -> str:
    """Return a URL with ``http`` where it has no scheme, as in ``127.1.0.1:8000``."""
    return url if "://" in url else f"http://{url}"


def only_run() -> str | None:
    """Return the endpoint of the only local deployment, ``None`` where none runs. Raises :class:`UnreachableError`."""
    endpoints = sorted(str(run["endpoint"]) for run in local_runs())
    if len(endpoints) > 1:
        raise UnreachableError(f"several deployments run here, {', '.join(endpoints)}: give the URL of one")
    return endpoints[0] if endpoints else None


def find_control(url: str, control: str | None, token: str | None) -> ControlEndpoint:
    """Find a deployment's control API. Raises :class:`UnreachableError`."""
    url = with_scheme(url).rstrip("/").removesuffix("/v1")
    control = None if control is None else with_scheme(control)
    token = token or os.environ.get("MMROUTER_CONTROL_TOKEN")
    if control and token:
        return ControlEndpoint(url, (control.rstrip("/"),), token)
    runs = list(local_runs())
    for run in runs:
        frontends, controls = run["frontends"], tuple(frontend["control"] for frontend in run["frontends"])
        urls = (run["endpoint"], *controls, *(frontend["url"] for frontend in frontends))
        if urlsplit(url).netloc in {urlsplit(each).netloc for each in urls}:
            with suppress(OSError):  # it is ending
                return ControlEndpoint(url, controls, Path(run["control_token"]).read_text().strip(), is_local=True)
    own_token = Path(os.environ.get("MMROUTER_CONFIG", CONFIG_DIR), "secrets", "control.token")
    if (ip := os.environ.get("POD_IP", "")) and own_token.is_file():
        return ControlEndpoint(url, (_control_url(ip),), own_token.read_text().strip())
    if control:
        raise UnreachableError("--control needs --token too, or the environment's MMROUTER_CONTROL_TOKEN")
    running = f"there is {', '.join(run['endpoint'] for run in runs)}" if runs else "none runs here"
    raise UnreachableError(
        f"{url} is not an endpoint of a running `mmrouter up` ({running}): name its control API with --control and "
        "--token, or run this in a frontend's pod, with kubectl exec deploy/NAME-frontend -- mmrouter ..."
    )


def local_runs() -> Iterator[dict[str, Any]]:
    """Yield the descriptions of this user's local deployments whose addresses are those of this network namespace.

    Raises ``OSError`` where a description cannot be read, such as for lack of a free descriptor.
    """
    try:
        folders = sorted(os.listdir(run_root()))
    except FileNotFoundError:
        return
    for folder in folders:
        # That run is ending, or the folder is no run's.
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
            run = json.loads((run_root() / folder / "run.json").read_text())
            if run.get("network") == network_namespace():
                yield run


def _control_url(ip: str, port: int = CONTROL_PORT) -> str:
    return f"http://{f'[{ip}]' if ':' in ip else ip}:{port}"


NOT_RUNNING = "its pod does not run"
ANSWER_SECONDS = 3.0
FORWARD_SECONDS = 8.0

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a value that could not be read; ``why`` is a sentence."""

    why: str


class Frontend(NamedTuple):
    """A frontend's display name, and the URL of its control API, or of another port, or why it has none."""

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
async def open_frontends(
    pods: Sequence[Mapping[str, Any]], kubeconfig: Path | None, port: int = CONTROL_PORT
) -> AsyncIterator[list[Frontend]]:
    """Make a port of each of these frontend pods reachable; forwarded ports are closed after the block."""
    forwards: list[asyncio.subprocess.Process] = []
    try:
        yield list(await asyncio.gather(*(_open(pod, port, kubeconfig, forwards) for pod in pods)))
    finally:
        for process in forwards:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _open(
    pod: Mapping[str, Any], port: int, kubeconfig: Path | None, forwards: list[asyncio.subprocess.Process]
) -> Frontend:
    name, ip = pod["metadata"]["name"], (pod.get("status") or {}).get("podIP", "")
    # A pod with a failing init container has an address without a listener.
    if not ip or (pod.get("status") or {}).get("phase") != "Running":
        return Frontend(name, Unread(NOT_RUNNING))
    if "KUBERNETES_SERVICE_HOST" in os.environ or ipaddress.ip_address(ip).is_loopback:
        return Frontend(name, _control_url(ip, port))
    return Frontend(name, await _forward(name, port, pod["metadata"]["namespace"], kubeconfig, forwards))


async def _forward(
    pod: str, port: int, namespace: str, kubeconfig: Path | None, forwards: list[asyncio.subprocess.Process]
) -> str | Unread:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return Unread("its pod's address is not reachable from here, and there is no kubectl to forward a port")
    argv = [kubectl, *([f"--kubeconfig={kubeconfig}"] if kubeconfig is not None else [])]
    argv += ["port-forward", f"--namespace={namespace}", f"pod/{pod}", f":{port}"]
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
