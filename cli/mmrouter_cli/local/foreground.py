"""`mmrouter up` in the foreground: start a deployment, show its readiness, run until a signal or the demo's end."""

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from mmrouter_cli import demo as demo_workload
from mmrouter_cli import local
from mmrouter_cli.demo import DemoError, DemoResult
from mmrouter_cli.local.pod_processes import VainError
from mmrouter_cli.status.control_endpoint import ControlEndpoint
from mmrouter_cli.status.wait_verified import NotReadyError, wait_verified
from mmrouter_lib.api import MMRouterDeployment

__all__ = ["DemoError", "NotReadyError", "run"]


async def run(
    deployment: MMRouterDeployment,
    *,
    base_dir: Path,
    engines: Literal["sim", "path"],
    engine_env: Path | None,
    objects: list[dict[str, Any]],
    demo: bool,
    wait_seconds: float,
    console: Console,
) -> DemoResult | None:
    """Run a deployment until ctrl-C, or until the demo is over; return the demo's result.

    When this returns or raises, no process and no file of the deployment is left. Raises :class:`NotReadyError`,
    :class:`DemoError`, ``mmrouter_cli.local.LocalError`` or ``mmrouter_lib.api.SpecError``.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with local.up(
        deployment, base_dir=base_dir, engines=engines, engine_env=engine_env, objects=objects
    ) as cluster:
        ended = asyncio.create_task(stop.wait())
        work = asyncio.create_task(_work(cluster, deployment, console, wait_seconds, demo=demo))
        await asyncio.wait((work, ended), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            return None
        result = work.result()
        if not demo:
            await ended
        ended.cancel()
        console.print("stopping")
        return result


async def _work(
    cluster: Any, deployment: MMRouterDeployment, console: Console, wait_seconds: float, *, demo: bool
) -> DemoResult | None:
    """Wait until every worker is verified on every frontend; then run the demo if requested."""
    try:
        await cluster.wait_ready(wait_seconds)
    except (TimeoutError, VainError) as error:
        raise NotReadyError(str(error)) from error
    endpoint = ControlEndpoint(cluster.endpoint, tuple(f.control for f in cluster.frontends), cluster.control_token)
    await wait_verified(endpoint, deployment, console, wait_seconds)
    console.print(f"[green]ready[/green] {cluster.endpoint}/v1")
    return await asyncio.to_thread(demo_workload.run, endpoint, deployment.spec.model.served_name) if demo else None
