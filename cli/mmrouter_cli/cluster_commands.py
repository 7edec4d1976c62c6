"""The commands `mmrouter init`, `crd`, `status`, `ui` and `doctor`: options, one call each, and what is printed."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from mmrouter_cli.options import (
    FAILED,
    Control,
    Json,
    Kubeconfig,
    Namespace,
    Target,
    Token,
    Url,
    control_or_leave,
    leave,
    local_url,
    output,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from mmrouter_cli.status.live_pages import Page
    from mmrouter_cli.status.view import View


_CRD_HEADER = "# Made from the models in mmrouter/mmrouter_lib/api by `mmrouter crd`: change those, not this file.\n"


def status(
    target: Target = None,
    namespace: Namespace = None,
    url: Url = None,
    control: Control = None,
    token: Token = None,
    kubeconfig: Kubeconfig = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat every second, until ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show pools, workers, exactness, hit ratio and conditions; exit status 1 where no frontend answers."""
    from mmrouter_cli.status import view as shown

    name, url = _name_or_url(target, url)
    url = url or _local_unless(name, namespace, kubeconfig, control)
    if url is None:
        if control is not None:
            leave("--control goes with a URL")
        views = shown.from_cluster(name, namespace, kubeconfig, watch=watch)
    else:
        _not_with_url(name, namespace, kubeconfig)
        views = shown.from_url(control_or_leave(url, control, token), watch=watch)
    try:
        reachable = asyncio.run(_show(views, live=watch, as_json=as_json))
    except shown.StatusError as error:
        leave(str(error))
    except KeyboardInterrupt:
        raise typer.Exit from None
    raise typer.Exit(0 if reachable else FAILED)


async def _show(views: "AsyncIterator[list[View]]", *, live: bool, as_json: bool) -> bool:
    """Show views as they come; return whether every deployment of the last ones was reachable."""
    from rich.live import Live

    from mmrouter_cli.status.view import UNREACHABLE, drawn

    now: list[View] = []
    if as_json:
        last = None
        async for now in views:
            line = json.dumps([asdict(view) for view in now])
            if line != last:
                typer.echo(line)
            last = line
    elif not live:
        async for now in views:
            output().print(drawn(now))
    else:
        with Live(auto_refresh=False) as screen:
            async for now in views:
                screen.update(drawn(now), refresh=True)
    return all(view.phase != UNREACHABLE for view in now)


def ui(
    target: Annotated[
        str | None,
        typer.Argument(
            help="An endpoint, like 127.1.0.1:8000, or the name of a deployment of the cluster. "
            "Default: the only local deployment."
        ),
    ] = None,
    namespace: Namespace = None,
    control: Control = None,
    token: Token = None,
    kubeconfig: Kubeconfig = None,
    as_json: Json = False,
) -> None:
    """Print the addresses of the live page, one per frontend; on a cluster, forward their ports until ctrl-C."""
    from mmrouter_cli.status import live_pages

    target = target or local_url() or leave("no `mmrouter up` runs here: give the URL of an endpoint or a name")
    if ":" in target:
        if namespace is not None or kubeconfig is not None:
            leave("--namespace and --kubeconfig go with a name")
        pages = asyncio.run(live_pages.of_endpoint(control_or_leave(target, control, token)))
        raise typer.Exit(0 if _show_pages(pages, as_json=as_json) else FAILED)
    from mmrouter_cli.cluster.reader import ClusterError

    if control is not None:
        leave("--control goes with a URL")
    try:
        forwarded = asyncio.run(
            _forward_pages(live_pages.of_cluster(target, namespace, kubeconfig, token), as_json=as_json)
        )
    except ClusterError as error:
        leave(str(error))
    except KeyboardInterrupt:
        raise typer.Exit from None
    raise typer.Exit(0 if forwarded else FAILED)


async def _forward_pages(opened: "AbstractAsyncContextManager[list[Page]]", *, as_json: bool) -> bool:
    async with opened as pages:
        if _show_pages(pages, as_json=as_json):
            typer.echo("mmrouter: these addresses work until ctrl-C", err=True)
            await asyncio.Event().wait()
    return False


def _show_pages(pages: "Sequence[Page]", *, as_json: bool) -> bool:
    """Print the pages; return whether there is one."""
    from mmrouter_cli.status.control_api import Unread

    shown = [page for page in pages if not isinstance(page.address, Unread)]
    for page in pages:
        if isinstance(page.address, Unread):
            typer.echo(f"mmrouter: {page.frontend} has no page: {page.address.why}", err=True)
    if as_json:
        typer.echo(json.dumps([page._asdict() for page in shown]))
    else:
        for page in shown:
            typer.echo(page.address)
    return bool(shown)


def _local_unless(*of_cluster: object) -> str | None:
    """Return the URL of the only local deployment, unless an option is about a cluster; ends without either."""
    if any(option is not None for option in of_cluster):
        return None
    url = local_url()
    if url is None:
        from mmrouter_cli.cluster.reader import NOT_CONFIGURED, is_configured

        if not is_configured():
            leave(f"no `mmrouter up` runs here, and {NOT_CONFIGURED}")
    else:
        typer.echo(f"mmrouter: the local deployment {url}; name a deployment to read the cluster", err=True)
    return url


def doctor(
    target: Target = None,
    namespace: Namespace = None,
    url: Url = None,
    control: Control = None,
    token: Token = None,
    kubeconfig: Kubeconfig = None,
    as_json: Json = False,
) -> None:
    """Check a deployment and give advice; exit status 1 where there is a problem."""
    from mmrouter_cli.doctor import diagnose, findings

    name, url = _name_or_url(target, url)
    url = url or _local_unless(name, namespace, kubeconfig, control)
    if url is None:
        from mmrouter_cli.cluster.reader import ClusterError

        if control is not None and name is None:
            leave("--control belongs to one deployment: give its name or its URL")
        try:
            diagnoses = asyncio.run(diagnose.on_cluster(name, namespace, kubeconfig, control, token))
        except (diagnose.AbsentError, ClusterError) as error:
            leave(str(error))
    else:
        _not_with_url(name, namespace, kubeconfig)
        diagnoses = asyncio.run(diagnose.on_url(control_or_leave(url, control, token)))
    if as_json:
        typer.echo(json.dumps(findings.as_json(diagnoses)))
    else:
        findings.show(output(), diagnoses)
    raise typer.Exit(FAILED if any(diagnosis.problems for diagnosis in diagnoses) else 0)


def rotate_keys(
    name: Annotated[str, typer.Argument(help="A deployment of the cluster.")],
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    wait: Annotated[float, typer.Option(help="Seconds until every pod must have the keys of a step.")] = 600.0,
) -> None:
    """Replace the keys between routers and sidecars without a restart; exit status 1 if it is not completed."""
    from mmrouter_cli.cluster import key_rotation
    from mmrouter_cli.cluster.reader import ClusterError

    try:
        asyncio.run(key_rotation.on_cluster(name, namespace, kubeconfig, typer.echo, wait))
    except ClusterError as error:
        leave(str(error))
    except key_rotation.RotationError as error:
        typer.echo(f"mmrouter: {error}", err=True)
        raise typer.Exit(FAILED) from error


def _name_or_url(target: str | None, url: str | None) -> tuple[str | None, str | None]:
    """Return the name and the URL that a command was given; only the latter has a colon."""
    return (None, target) if url is None and target is not None and ":" in target else (target, url)


def _not_with_url(name: str | None, namespace: str | None, kubeconfig: Path | None) -> None:
    if name is not None or namespace is not None or kubeconfig is not None:
        leave("a URL excludes a name, --namespace and --kubeconfig")


def init(
    file: Annotated[Path, typer.Argument(help="The file to write; - prints it.")] = Path("mmrouter.yaml"),
    model: Annotated[str | None, typer.Option(help="Repository of the model hub.")] = None,
    engine: Annotated[str | None, typer.Option(help="vllm or sglang.")] = None,
    accelerator: Annotated[str | None, typer.Option(help="nvidia, amd, intel-i915, intel-xe, gaudi or cpu.")] = None,
    replicas: Annotated[str | None, typer.Option(help="Engine pods.")] = None,
    name: Annotated[str | None, typer.Option(help="The deployment's name. Default: from the model's.")] = None,
    image: Annotated[
        str | None, typer.Option(help="The engine's image. Default: the one its project publishes.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; use defaults instead.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Ask four questions, or take the options, and write a commented MMRouterDeployment."""
    from mmrouter_cli import init as init_answers

    given = {"model": model, "engine": engine, "accelerator": accelerator, "replicas": replicas}
    given |= {"name": name, "image": image}
    printed = str(file) == "-"
    if not printed and file.exists() and not force:
        leave(f"{file} exists: --force overwrites it")
    values: dict[str, Any] = {}
    for field, answer in given.items():
        if answer is not None:
            try:
                values[field] = init_answers.READ[field](answer)
            except init_answers.AnswerError as error:
                leave(f"--{field}: {error}")
    for field, question in init_answers.QUESTIONS.items():
        if field not in values and not yes:
            values[field] = _ask(field, question)
    answers = init_answers.Answers(**values)
    if printed:
        typer.echo(init_answers.text(answers), nl=False)
        return
    try:
        init_answers.write(file, answers, force=force)
    except FileExistsError:
        leave(f"{file} exists: --force overwrites it")
    except OSError as error:
        leave(f"cannot write {file}: {error.strerror}")
    if answers.needs_image:
        where = f"{answers.engine} on {answers.accelerator}"
        typer.echo(f"mmrouter: no image of {where} is published: put your own into {file}", err=True)
    typer.echo(f"wrote {file}; apply it with: kubectl apply -f {file}; see before what that does:", err=True)
    typer.echo(f"mmrouter plan {file}", err=True)


def _ask(field: str, question: str) -> str | int:
    """Ask until the answer is valid. Ends with status 2 at the end of input."""
    from mmrouter_cli import init as init_answers

    def read(text: str) -> str | int:
        try:
            return init_answers.READ[field](text)
        except init_answers.AnswerError as error:
            raise typer.BadParameter(str(error)) from error

    default = str(getattr(init_answers.Answers(), field))
    try:
        answer: str | int = typer.prompt(question, default=default, value_proc=read, err=True)
    except typer.Abort:
        leave(f"\nno answer: give --{field}, or --yes for the defaults")
    return answer


class _Dumper(yaml.SafeDumper):
    """Writes equal values out each time: anchors are hard to read and some YAML readers refuse them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def crd_text() -> str:
    """Return the CustomResourceDefinition as YAML, byte for byte the same on every run."""
    from mmrouter_lib.api.crd import definition

    return _CRD_HEADER + yaml.dump(definition(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def crd(
    check: Annotated[
        Path | None, typer.Option(help="Print nothing; exit status 1 if this file is not the definition.")
    ] = None,
) -> None:
    """Print the CustomResourceDefinition of MMRouterDeployment as YAML."""
    if check is None:
        typer.echo(crd_text(), nl=False)
        return
    try:
        current = check.read_bytes() == crd_text().encode()
    except OSError as error:
        leave(f"cannot read {check}: {error.strerror}")
    if not current:
        typer.echo(f"mmrouter: {check} differs from the models: write it with `mmrouter crd > {check}`", err=True)
        raise typer.Exit(FAILED)
