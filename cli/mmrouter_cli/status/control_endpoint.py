"""Finds a deployment's control API and its token from the URL of its endpoint.

A running ``mmrouter up`` has a ``run.json`` in its run folder, and a frontend's own pod has a control port and its
token; elsewhere ``--control`` and ``--token`` (or ``MMROUTER_CONTROL_TOKEN``) are needed.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mmrouter_cli.local import run_root
from mmrouter_lib.api.pod_paths import CONFIG_DIR

CONTROL_PORT = 8001


class UnreachableError(Exception):
    """The control API is unknown; the message says which options to give."""


@dataclass(frozen=True, slots=True)
class ControlEndpoint:
    """A deployment's endpoint for clients, the control API of every frontend, and its token."""

    url: str
    controls: tuple[str, ...]
    token: str

    @property
    def authorization(self) -> dict[str, str]:
        """Headers for the control API."""
        return {"authorization": f"Bearer {self.token}"}


def find_control(url: str, control: str | None, token: str | None) -> ControlEndpoint:
    """Find a deployment's control API. Raises :class:`UnreachableError`."""
    url = url.rstrip("/").removesuffix("/v1")
    token = token or os.environ.get("MMROUTER_CONTROL_TOKEN")
    if control and token:
        return ControlEndpoint(url, (control.rstrip("/"),), token)
    for run_file in sorted(run_root().glob("*/run.json")):
        if (of_run := _from_run_file(run_file, url)) is not None:
            return of_run
    if (of_pod := _from_own_pod(url, os.environ)) is not None:
        return of_pod
    if control:
        raise UnreachableError("--control needs --token too, or the environment's MMROUTER_CONTROL_TOKEN")
    raise UnreachableError(
        f"{url} is not an endpoint of a running `mmrouter up`{_running()}: name its control API with --control and "
        "--token, or run this in a frontend's pod, with kubectl exec deploy/NAME-frontend -- mmrouter ..."
    )


def _running() -> str:
    """Return the endpoints of local deployments, as a hint for a mistyped URL."""
    endpoints = []
    for path in sorted(run_root().glob("*/run.json")):
        with suppress(OSError, ValueError, KeyError):  # that run is ending
            endpoints.append(str(json.loads(path.read_text())["endpoint"]))
    return f" (there is {', '.join(endpoints)})" if endpoints else " (none runs here)"


def _from_own_pod(url: str, env: Mapping[str, str]) -> ControlEndpoint | None:
    token = Path(env.get("MMROUTER_CONFIG", CONFIG_DIR), "secrets", "control.token")
    host = env.get("POD_IP", "")
    if not host or not token.is_file():
        return None
    return ControlEndpoint(
        url, (f"http://{f'[{host}]' if ':' in host else host}:{CONTROL_PORT}",), token.read_text().strip()
    )


def _from_run_file(path: Path, url: str) -> ControlEndpoint | None:
    try:
        run = json.loads(path.read_text())
        token = Path(run["control_token"]).read_text().strip()
    except (OSError, ValueError, KeyError):
        return None  # that run is ending
    urls = [run["endpoint"], *(f["url"] for f in run["frontends"]), *(f["control"] for f in run["frontends"])]
    if urlsplit(url).netloc not in {urlsplit(each).netloc for each in urls}:
        return None
    return ControlEndpoint(url, tuple(f["control"] for f in run["frontends"]), token)
