"""The typer application: each command parses its options, calls one function and prints the result."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import quote

import httpx
import typer
import yaml
from rich.console import Console
from rich.text import Text

from mmrouter_cli import cluster_commands
from mmrouter_cli.bench.command import bench
from mmrouter_cli.options import (
    FAILED,
    USAGE,
    CaCert,
    Control,
    Endpoint,
    Insecure,
    Json,
    Token,
    control_or_leave,
    is_endpoint,
    leave,
    only_endpoint,
    output,
    table,
    trust,
)
from mmrouter_lib import __version__
from mmrouter_lib.api import MMRouterDeployment, SpecError, parse_deployment
from mmrouter_lib.api.deployment import KIND, NO_SUCH_FIELD

EXAMPLES = next(
    folder
    for folder in (Path(__file__).with_name("examples"), Path(__file__).parents[2] / "examples")
    if (folder / "demo.yaml").is_file()
)
"""Part of this package in an installed distribution, else of the checkout."""
DEMOS = {"vllm": "demo.yaml", "sglang": "demo-sglang.yaml"}

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Proved-exact KV routing for vision-language models.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (cluster_commands.init, cluster_commands.status, cluster_commands.ui, cluster_commands.doctor, bench):
    app.command()(command)
app.command()(cluster_commands.rotate_keys)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Handle options without a command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def up(
    file: Annotated[Path, typer.Argument(help="A file with one MMRouterDeployment, YAML or JSON.")],
    engines: Annotated[Literal["sim", "path"], typer.Option(help="sim: simulated engines; path: real ones.")] = "sim",
    engine_env: Annotated[
        Path | None, typer.Option(help="With --engines path: the environment whose bin/ holds the engine's command.")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Send a short workload, show how it was routed, and exit.")
    ] = False,
    gateway: Annotated[
        Literal["envoy"] | None, typer.Option(help="Also run Envoy in front, with the routers as its endpoint picker.")
    ] = None,
    as_json: Json = False,
    wait: Annotated[float, typer.Option(help="Seconds until everything must be ready.")] = 600.0,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the pods' output instead of what they wait for.")
    ] = False,
) -> None:
    """Run a deployment's pods as local processes, in the foreground, until ctrl-C."""
    from mmrouter_cli.chat_probe import ProbeError
    from mmrouter_cli.local import foreground
    from mmrouter_cli.local.folders import LocalError

    deployment, objects = _read(file)
    console = Console(stderr=True)
    try:
        deployment = deployment if gateway is None else foreground.behind_gateway(deployment)
    except SpecError as error:
        _refuse(file, error)
    except LocalError as error:
        leave(str(error))
    run = foreground.run(
        deployment,
        base_dir=file.resolve().parent,
        engines=engines,
        engine_env=engine_env,
        objects=objects,
        demo=demo,
        wait_seconds=wait,
        console=console,
        gateway=gateway is not None,
        verbose=verbose,
    )
    try:
        result = asyncio.run(run)
    except LocalError as error:
        leave(str(error))
    except (foreground.NotReadyError, ProbeError) as error:
        # Unwrapped, so that names and paths can be copied.
        console.print(Text.assemble(("mmrouter:", "red"), f" {error}"), soft_wrap=True, highlight=False)
        raise typer.Exit(FAILED) from error
    except SpecError as error:
        _refuse(file, error)
    if result is None:
        raise typer.Exit(FAILED if demo else 0)
    # Printed last, below the progress of the start.
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        from mmrouter_cli.demo_workload import show

        show(output(), result)
    raise typer.Exit(0 if result.passed else FAILED)


@app.command()
def gateway(
    config: Annotated[
        Path | None, typer.Option(help="Aliases and weighted splits, YAML or JSON; read again when it changes.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="In a pod: the deployments' namespace. Default: what `up` runs here."),
    ] = None,
    selector: Annotated[str, typer.Option(help="With --namespace: labels of the deployments. Default: all.")] = "",
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: all of a pod, else one of 127.1.0.0/16.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port for clients.")] = 8080,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535, help="Port for health and metrics.")] = 9090,
    api_keys: Annotated[
        Path | None, typer.Option(help="A folder of client keys, one file per tenant. Default: none is needed.")
    ] = None,
    tls: Annotated[Path | None, typer.Option(help="A folder with tls.crt and tls.key, to serve TLS.")] = None,
    ca: Annotated[Path | None, typer.Option(help="A folder with ca.crt, for deployments that serve TLS.")] = None,
    max_request_bytes: Annotated[str, typer.Option(help="Largest request body.")] = "64Mi",
    max_held_bytes: Annotated[str, typer.Option(help="Limit of all request bodies that are held.")] = "256Mi",
) -> None:
    """Serve many deployments at one address, until ctrl-C: the model of a request decides which one gets it."""
    from mmrouter_cli.local import gateway as local
    from mmrouter_cli.local.folders import LocalError
    from mmrouter_lib.api import quantity_bytes
    from mmrouter_router.gateway.app import GatewaySettings, main

    try:
        request_bytes, held_bytes = quantity_bytes(max_request_bytes), quantity_bytes(max_held_bytes)
    except ValueError as error:
        leave(f"--max-request-bytes and --max-held-bytes are numbers of bytes such as 64Mi: {error}")
    try:
        discover = local.discover if namespace is None else local.of_namespace(namespace, selector)
        with local.address(host, (port, metrics_port), in_pod=namespace is not None) as taken:
            settings = GatewaySettings(
                host=taken,
                port=port,
                metrics_port=metrics_port,
                config=config,
                api_keys=api_keys,
                tls=tls,
                ca=ca,
                max_request_bytes=request_bytes,
                max_held_bytes=held_bytes,
            )
            raise typer.Exit(main(settings, discover))
    except LocalError as error:
        leave(str(error))


@app.command()
def demo(
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="The engine that is simulated.")] = "vllm",
    as_json: Json = False,
) -> None:
    """Run a small deployment with simulated engines, send a short workload, show how it was routed, and exit."""
    up(EXAMPLES / DEMOS[engine], demo=True, as_json=as_json)


app.command()(cluster_commands.crd)


@app.command()
def plan(
    file: Annotated[Path, typer.Argument(help="A file with one MMRouterDeployment, YAML or JSON.")],
    against: Annotated[
        str | None, typer.Option(help="What runs now: `cluster`, or the file that was applied last. Default: nothing.")
    ] = None,
    kubeconfig: Annotated[Path | None, typer.Option(help="With --against cluster: how to reach it.")] = None,
    config: Annotated[Path | None, typer.Option(help="The operator's configuration file.")] = None,
    as_json: Json = False,
) -> None:
    """Show what applying FILE would do, step by step, and which pods restart because of what. Writes nothing.

    Exit status 0 with or without changes; 2 if they cannot be determined.
    """
    from mmrouter_cli import plan as planning
    from mmrouter_operator.model.config import ConfigError, load_config

    deployment, _ = _read(file)
    try:
        settings = load_config(config)
        if against is None:
            report = planning.from_nothing(deployment, settings)
        elif against == "cluster":
            report = asyncio.run(planning.from_cluster(deployment, kubeconfig, settings))
        else:
            report = planning.from_file(deployment, _read(Path(against))[0], settings)
    except SpecError as error:
        _refuse(file, error)
    except (planning.PlanError, ConfigError, OSError) as error:
        leave(str(error))
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        typer.echo("\n".join(report.lines()))


@app.command()
def verify(
    url: Endpoint = None,
    control: Control = None,
    token: Token = None,
    api_key: Annotated[str | None, typer.Option(help="A client's API key.", envvar="OPENAI_API_KEY")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=20, help="Number of rounds, each with new text.")] = 3,
    strict: Annotated[
        bool, typer.Option(help="Fail on a partial decision; --no-strict checks it up to its first unpredicted image.")
    ] = True,
    cacert: CaCert = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Prove that routing is exact, end to end; exit status 1 if it is not."""
    from mmrouter_cli import verify as verification

    url = url or only_endpoint()
    with httpx.Client(timeout=60, verify=trust(cacert, insecure)) as client:
        verifier = verification.Verifier(
            control_or_leave(url, control, token), api_key=api_key, client=client, strict=strict
        )
        checks = verifier.run(rounds)
    result = {"strict": strict, **verification.as_json(checks)}
    if as_json:
        typer.echo(json.dumps(result))
    else:
        shown = table(f"verification of {url}", "check", "result", "seen")
        for check in checks:
            shown.add_row(check.name, "[green]PASS" if check.passed else "[red]FAIL", check.message.replace("[", "\\["))
        console = output()
        console.print(shown)
        allowed = "" if strict else " (partial decisions allowed)"
        console.print(f"[green]exact[/green]{allowed}" if result["passed"] else f"[red]NOT exact[/red]{allowed}")
    raise typer.Exit(0 if result["passed"] else FAILED)


@app.command()
def explain(
    url: Endpoint = None,
    request_id: Annotated[
        str | None, typer.Argument(help="A request id or id of an answer. Default: `last`, the newest request.")
    ] = None,
    dry_run: Annotated[
        Path | None, typer.Option(help="A request as JSON: explain where it would go, without sending it.")
    ] = None,
    path: Annotated[str, typer.Option(help="With --dry-run: the request's path.")] = "/v1/chat/completions",
    control: Control = None,
    token: Token = None,
    api_key: Annotated[str | None, typer.Option(help="With --dry-run: the API key of the request's tenant.")] = None,
    parity: Annotated[
        bool, typer.Option("--parity", help="With a request id: compare the prediction with what the engine holds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show why a request went to its engine: the score of every candidate by its terms, and where its blocks are."""
    from mmrouter_cli import explain as explained

    if url is not None and request_id is None and dry_run is None and not is_endpoint(url):
        url, request_id = None, url
    if request_id is not None and dry_run is not None:
        leave("give either a request id or --dry-run FILE")
    if dry_run is None:
        request_id = request_id or "last"
    if parity and dry_run is not None:
        leave("--parity needs a request that was sent: give its id")
    url = url or only_endpoint()
    endpoint = control_or_leave(url, control, token)
    with httpx.Client(timeout=30, headers=endpoint.authorization) as client:
        base = endpoint.controls[0]
        try:
            if request_id == "last":
                base, request_id = explained.newest(client, endpoint.controls) or leave("no request is kept")
            if dry_run is not None:
                headers = {"x-mmrouter-api-key": api_key} if api_key else {}
                body, params = dry_run.read_bytes(), {"path": path}
                answer = client.post(f"{base}/control/explain", content=body, params=params, headers=headers)
            else:
                answer = client.get(
                    f"{base}/control/decisions/{quote(request_id or '', safe='')}", params={"parity": parity}
                )
        except OSError as error:
            leave(f"cannot read {dry_run}: {error.strerror}")
        except httpx.HTTPError as error:
            leave(f"{base} does not answer: {error}")
    if answer.status_code != 200:
        leave(explained.error_text(answer))
    if as_json:
        typer.echo(json.dumps(answer.json()))
    else:
        explained.show(output(), answer.json())


def _read(file: Path) -> tuple[MMRouterDeployment, list[dict[str, Any]]]:
    """Return the file's deployment, and the ConfigMaps and Secrets beside it that it may name."""
    try:
        documents = [d for d in yaml.safe_load_all(file.read_text()) if d is not None]
    except OSError as error:
        leave(f"cannot read {file}: {error.strerror}")
    except yaml.YAMLError as error:
        leave(f"{file} is not YAML: {error}")
    companions = [d for d in documents if isinstance(d, dict) and d.get("kind") in ("ConfigMap", "Secret")]
    deployments = [d for d in documents if d not in companions]
    if len(deployments) != 1:
        leave(f"{file} holds {len(deployments)} deployments; one MMRouterDeployment is expected")
    kind = deployments[0].get("kind") if isinstance(deployments[0], dict) else None
    if kind != KIND:
        actual = f"its kind is {str(kind)[:80]!r}" if kind is not None else "it has no field kind"
        leave(f"{file} is no {KIND}: {actual}")
    try:
        return parse_deployment(deployments[0]), companions
    except SpecError as error:
        _refuse(file, error)


def _refuse(file: Path, error: SpecError) -> NoReturn:
    for path, sentence in error.errors:
        hint = f"; did you mean {close}?" if sentence == NO_SUCH_FIELD and (close := _close_field(path)) else ""
        typer.echo(f"{file}: {path}: {sentence}{hint}", err=True)
    raise typer.Exit(USAGE) from error


def _close_field(path: str) -> str:
    """Return the field that a misspelt one is close to, empty without one."""
    from difflib import get_close_matches

    from mmrouter_lib.api.crd import definition

    schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    *parents, name = path.replace("[]", "").split(".")
    for parent in parents:
        schema = schema.get("properties", {}).get(parent.partition("[")[0], {})
        schema = schema.get("items", schema)
    return next(iter(get_close_matches(name, schema.get("properties", {}), n=1)), "")
