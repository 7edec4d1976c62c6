"""Wait until a local deployment is not only ready but proved: every worker verified on every frontend."""

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
"""Roles of which every pod comes to a standing, or answers where nothing of it can be proved."""


class NotReadyError(Exception):
    """Something did not come up in time; the message says what it waited for."""


async def wait_verified(
    endpoint: ControlEndpoint, deployment: MMRouterDeployment, console: Console, seconds: float
) -> None:
    """Print each worker's standing as it comes. Raises :class:`NotReadyError` with what is missing."""
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
    """Whether nothing more is to come of it; of an encoder of SGLang, once it answers."""
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
    where = (control, worker["uid"])
    if shown.get(where) != line:
        shown[where] = line
        console.print(f"{control.removeprefix('http://')} {worker['name']}: {line}", highlight=False, markup=False)
