"""Where a deployment's control ports are, and their token.

A running ``mmrouter up`` leaves a ``run.json`` in its run folder; a URL that stands in one needs no further option. Nor
does any in a frontend's own pod, which has a control port and its token. Elsewhere ``--control`` and ``--token`` (or
``MMROUTER_CONTROL_TOKEN``) name them.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mmrouter_cli.local import run_root
from mmrouter_lib.api.paths import CONFIG_DIR

CONTROL_PORT = 8001


class UnreachableError(Exception):
    """There is no way to the control API; the message says what to give."""


@dataclass(frozen=True, slots=True)
class Reach:
    """One deployment: where clients go, where every frontend's control API is, and the token for it."""

    url: str
    controls: tuple[str, ...]
    token: str

    @property
    def authorization(self) -> dict[str, str]:
        """Headers for the control API."""
        return {"authorization": f"Bearer {self.token}"}


def reach(url: str, control: str | None, token: str | None) -> Reach:
    """Find a deployment's control API. Raises :class:`UnreachableError`."""
    url = url.rstrip("/").removesuffix("/v1")
    token = token or os.environ.get("MMROUTER_CONTROL_TOKEN")
    if control and token:
        return Reach(url, (control.rstrip("/"),), token)
    for folder in sorted(run_root().glob("*/run.json")):
        found = _from_run_file(folder, url)
        if found is not None:
            return found
    own = _from_own_pod(url, os.environ)
    if own is not None:
        return own
    if control:
        raise UnreachableError("--control wants --token too, or the environment's MMROUTER_CONTROL_TOKEN")
    raise UnreachableError(
        f"{url} is not an endpoint of a running `mmrouter up`{_running()}: name its control API with --control and "
        "--token, or ask in a frontend's pod, with kubectl exec deploy/NAME-frontend -- mmrouter ..."
    )


def _running() -> str:
    """Say where the deployments are that do run here, for who has mistyped one or forgotten its http://."""
    found = []
    for path in sorted(run_root().glob("*/run.json")):
        with suppress(OSError, ValueError, KeyError):  # that run is ending at this moment
            found.append(str(json.loads(path.read_text())["endpoint"]))
    return f" (there is {', '.join(found)})" if found else " (none runs here)"


def _from_own_pod(url: str, env: Mapping[str, str]) -> Reach | None:
    token = Path(env.get("MMROUTER_CONFIG", CONFIG_DIR), "secrets", "control.token")
    host = env.get("POD_IP", "")
    if not host or not token.is_file():
        return None
    return Reach(url, (f"http://{f'[{host}]' if ':' in host else host}:{CONTROL_PORT}",), token.read_text().strip())


def _from_run_file(path: Path, url: str) -> Reach | None:
    try:
        run = json.loads(path.read_text())
        token = Path(run["control_token"]).read_text().strip()
    except (OSError, ValueError, KeyError):
        return None  # that run is ending at this moment
    here = urlsplit(url).netloc
    urls = [run["endpoint"], *(f["url"] for f in run["frontends"]), *(f["control"] for f in run["frontends"])]
    if here not in {urlsplit(known).netloc for known in urls}:
        return None
    return Reach(url, tuple(f["control"] for f in run["frontends"]), token)
