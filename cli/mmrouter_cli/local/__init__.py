"""Runs rendered pods as processes of this machine (docs/architecture.md).

A pod has a loopback address of its own, so ports are as in a cluster; a volume is a folder, whose mount paths are
replaced in arguments and environment; a Service is a TCP forwarder. Nothing outlives the run.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmrouter_cli.local.folders import LocalError, run_root

if TYPE_CHECKING:
    from mmrouter_cli.local.cluster import LocalCluster
    from mmrouter_cli.local.process import LogSink
    from mmrouter_lib.api import MMRouterDeployment

__all__ = ["LocalError", "run_root", "up"]


@asynccontextmanager
async def up(
    deployment: "MMRouterDeployment",
    *,
    base_dir: Path,
    engines: Literal["sim", "path"] = "sim",
    engine_env: Path | None = None,
    log: "LogSink | None" = None,
    objects: Iterable[dict[str, Any]] = (),
) -> "AsyncIterator[LocalCluster]":
    """Render a deployment with fresh secrets and run it until the block ends.

    ``engines``: simulated ones, or real ones from ``engine_env`` (else PATH). ``objects``: ConfigMaps and Secrets that
    the deployment refers to. Raises :class:`LocalError`, or ``mmrouter_lib.api.SpecError`` for what cannot be rendered.
    """
    # Deployables are imported lazily, and only by the command line tool (CONTRIBUTING.md).
    from mmrouter_cli.local.cluster import run_local
    from mmrouter_operator.model.credentials import new_secret_data
    from mmrouter_operator.render import render

    rendered = render(deployment, secrets=new_secret_data())
    async with run_local(
        [*objects, *rendered],
        base_dir=base_dir,
        name=deployment.metadata.name,
        engines=engines,
        engine_env=engine_env,
        log=log,
    ) as cluster:
        yield cluster
