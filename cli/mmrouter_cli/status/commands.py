"""The commands `mmrouter status` and `mmrouter doctor`, for a deployment on a cluster or behind a URL."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mmrouter_cli.options import (
    FAILED,
    Control,
    DeploymentName,
    Json,
    Kubeconfig,
    Namespace,
    Token,
    control_or_leave,
    leave,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mmrouter_cli.status.view import View


def status(
    name: DeploymentName = None,
    namespace: Namespace = None,
    url: Annotated[str | None, typer.Option(help="Query the frontends behind this endpoint instead.")] = None,
    control: Control = None,
    token: Token = None,
    kubeconfig: Kubeconfig = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat every second, until ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show pools, workers, exactness, hit ratio and conditions."""
    from mmrouter_cli.status import view as shown

    if url is None:
        if control is not None:
            leave("--control goes with --url")
        views = shown.from_cluster(name, namespace, kubeconfig, watch=watch)
    else:
        _not_with_url(name, namespace, kubeconfig)
        views = shown.from_url(control_or_leave(url, control, token), watch=watch)
    try:
        asyncio.run(_show(views, live=watch, as_json=as_json))
    except shown.StatusError as error:
        leave(str(error))
    except KeyboardInterrupt:
        raise typer.Exit from None


async def _show(views: "AsyncIterator[list[View]]", *, live: bool, as_json: bool) -> None:
    from rich.live import Live

    from mmrouter_cli.status.view import drawn

    if as_json:
        last = None
        async for now in views:
            line = json.dumps([view.as_json() for view in now])
            if line != last:
                typer.echo(line)
            last = line
        return
    console = Console()
    if not live:
        async for now in views:
            console.print(drawn(now))
        return
    with Live(console=console, auto_refresh=False) as screen:
        async for now in views:
            screen.update(drawn(now), refresh=True)


def doctor(
    name: DeploymentName = None,
    namespace: Namespace = None,
    url: Annotated[str | None, typer.Option(help="Check only the frontends behind this endpoint.")] = None,
    control: Control = None,
    token: Token = None,
    kubeconfig: Kubeconfig = None,
    as_json: Json = False,
) -> None:
    """Check a deployment and give advice; exit status 1 where there is a problem."""
    from mmrouter_cli.doctor import diagnose, findings

    if url is None:
        from mmrouter_cli.cluster_reader import ClusterError
        from mmrouter_cli.doctor.collect import AbsentError

        if control is not None and name is None:
            leave("--control belongs to one deployment: name it, or give --url")
        try:
            diagnoses = asyncio.run(diagnose.on_cluster(name, namespace, kubeconfig, control, token))
        except (AbsentError, ClusterError) as error:
            leave(str(error))
    else:
        _not_with_url(name, namespace, kubeconfig)
        diagnoses = asyncio.run(diagnose.on_url(control_or_leave(url, control, token)))
    if as_json:
        typer.echo(json.dumps(findings.as_json(diagnoses)))
    else:
        findings.show(Console(), diagnoses)
    raise typer.Exit(FAILED if any(diagnosis.problems for diagnosis in diagnoses) else 0)


def _not_with_url(name: str | None, namespace: str | None, kubeconfig: Path | None) -> None:
    if name is not None or namespace is not None or kubeconfig is not None:
        leave("--url excludes a name, --namespace and --kubeconfig")
