"""What `mmrouter gateway` finds: the deployments of this machine, or those of its pod's namespace, and its address."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from mmrouter_cli.local.folders import LocalError
from mmrouter_cli.local.loopback_network import take_block
from mmrouter_cli.status.control_api import Frontend, Unread, client, fetch, local_runs
from mmrouter_router.core.settings import SERVICE_ACCOUNT_DIR, ApiServer
from mmrouter_router.gateway.app import Discover
from mmrouter_router.gateway.discovery import Update, watch_deployments
from mmrouter_router.gateway.metrics import GatewayMetrics
from mmrouter_router.gateway.model_routes import Deployment, Exact

SECONDS: Final = 1.0
ALL: Final = "0.0.0.0"  # noqa: S104 - a network policy guards the pod
PORTS: Final = {"http": 80, "https": 443}


@contextmanager
def address(host: str | None, ports: Sequence[int], *, in_pod: bool) -> Iterator[str]:
    """Yield the address to listen on; without a given one a free one of this machine, as deployments have.

    Raises :class:`LocalError`.
    """
    if host is None and not in_pod:
        with closing(take_block(ports, 0)) as block:
            yield block.service
    elif host is None:
        yield "::" if ":" in os.environ.get("POD_IP", "") else ALL
    else:
        yield host


def of_namespace(namespace: str, selector: str) -> Discover:
    """Return what follows the deployments of a namespace. Raises :class:`LocalError` outside of a cluster."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        raise LocalError("--namespace is for a pod: KUBERNETES_SERVICE_HOST is not set")
    server = ApiServer(host, os.environ.get("KUBERNETES_SERVICE_PORT", "443"), Path(SERVICE_ACCOUNT_DIR))
    return partial(watch_deployments, server, namespace, selector)


async def discover(update: Update, metrics: GatewayMetrics) -> None:
    """Follow the deployments that `mmrouter up` runs on this machine. One that cannot be read stays as it was."""
    last: tuple[Deployment, ...] | None = None
    while True:
        try:
            deployments = tuple(sorted([await described(run) for run in local_runs() if run["endpoint"]]))
        except OSError:  # such as without a free descriptor
            metrics.discovery_errors.labels("unreadable").inc()
            metrics.discovery_synced.set(0)
        else:
            if deployments != last:
                last = deployments
                update(deployments)
            metrics.discovery_synced.set(1)
        await asyncio.sleep(SECONDS)


async def described(run: Mapping[str, Any]) -> Deployment:
    """Return the deployment of a run, with its exactness as its frontends tell it."""
    url = urlsplit(str(run["endpoint"]))
    states = await _states(run)
    verdicts = [worker.get("verified") for state in states for worker in state["workers"]]
    exact: Exact = "Unknown"
    if "False" in verdicts:
        exact = "False"
    elif verdicts and len(states) == len(run["frontends"]) and set(verdicts) == {"True"}:
        exact = "True"
    decisions, exactly = (sum(state.get(name, 0) for state in states) for name in ("decisions", "exact_decisions"))
    return Deployment(
        name=str(run["deployment"]),
        model=str(run.get("model") or run["deployment"]),
        host=url.hostname or "",
        port=url.port or PORTS[url.scheme],
        tls=url.scheme == "https",
        exact=exact,
        exact_ratio=round(exactly / decisions, 2) if decisions else None,
    )


async def _states(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        token = Path(run["control_token"]).read_text().strip()
    except OSError:  # it is ending
        return []
    async with client(token) as asking:
        frontends = [Frontend(frontend["name"], frontend["control"]) for frontend in run["frontends"]]
        states = await asyncio.gather(*(fetch(asking, frontend) for frontend in frontends))
    return [state for state in states if not isinstance(state, Unread)]
