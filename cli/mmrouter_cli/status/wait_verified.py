"""Waits until every worker of a local deployment is verified on every frontend."""

import asyncio
from typing import Any

import httpx
from rich.console import Console

from mmrouter_cli.status.control_endpoint import ControlEndpoint
from mmrouter_cli.verify import NOT_PROBED
from mmrouter_lib.api import MMRouterDeployment

STEP_SECONDS = 0.1
SETTLED = frozenset({"verified", "degraded", "refused"})
AWAITED = frozenset({"worker", "prefill", "decode", "encoder"})
"""Roles whose pods reach a final standing, or answer where they cannot be proved."""


class NotReadyError(Exception):
    """The deployment was not ready in time; the message says what is missing."""


async def wait_verified(
    endpoint: ControlEndpoint, deployment: MMRouterDeployment, console: Console, seconds: float
) -> None:
    """Wait, and print changes of workers' standing. Raises :class:`NotReadyError`."""
    wanted = sum(pool.replicas for pool in deployment.spec.pools if pool.role in AWAITED)
    shown: dict[tuple[str, str], str] = {}
    missing = "no frontend answered"
    async with httpx.AsyncClient(timeout=5, headers=endpoint.authorization) as client:
        try:
            async with asyncio.timeout(seconds):
                while True:
                    views = [await _view(client, control) for control in endpoint.controls]
                    settled = True
                    for control, workers in zip(endpoint.controls, views, strict=True):
                        for worker in workers:
                            _show(console, shown, control, worker)
                        done = sum(_is_settled(worker) for worker in workers)
                        if done < wanted:
                            settled = False
                            missing = f"{control} sees {done} of {wanted} workers verified"
                    if settled and views:
                        return
                    await asyncio.sleep(STEP_SECONDS)
        except TimeoutError:
            raise NotReadyError(missing) from None


def _is_settled(worker: dict[str, Any]) -> bool:
    """Whether a worker's standing is final; SGLang's encoders only have to answer."""
    return worker["standing"] in SETTLED or worker.get("cause") == NOT_PROBED


async def _view(client: httpx.AsyncClient, control: str) -> list[dict[str, Any]]:
    try:
        answer = await client.get(f"{control}/control/state")
    except httpx.TransportError:
        return []
    return list(answer.json()["workers"]) if answer.status_code == 200 else []


def _show(console: Console, shown: dict[tuple[str, str], str], control: str, worker: dict[str, Any]) -> None:
    line = worker["standing"]
    if worker["canary"] == "False":
        line += f" ({worker['canary_cause']}: {worker['canary_message']})"
    key = (control, worker["uid"])
    if shown.get(key) != line:
        shown[key] = line
        console.print(f"{control.removeprefix('http://')} {worker['name']}: {line}", highlight=False, markup=False)
