"""Options and tables of several commands, and how a command ends with an error."""

import re
import ssl
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmrouter_cli.status.control_api import ControlEndpoint, UnreachableError, find_control, only_run

FAILED, USAGE = 1, 2
PIPED_WIDTH = 140  # columns

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Control = Annotated[str | None, typer.Option(help="URL of a frontend's control API, like http://HOST:8001.")]
Url = Annotated[str | None, typer.Option(help="The endpoint, as an option.")]
Token = Annotated[str | None, typer.Option(help="The control token.", envvar="MMROUTER_CONTROL_TOKEN")]
Endpoint = Annotated[
    str | None, typer.Argument(help="The endpoint, like 127.1.0.1:8000. Default: the only local deployment.")
]
Target = Annotated[
    str | None,
    typer.Argument(
        help="A deployment of the cluster, or an endpoint, like 127.1.0.1:8000. "
        "Default: the only local deployment, or else all of a namespace."
    ),
]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Default: that of kubectl's context.")]
Kubeconfig = Annotated[Path | None, typer.Option(help="How to reach the cluster. Default: as kubectl does.")]

CaCert = Annotated[
    Path | None, typer.Option("--cacert", help="Certificates to trust for https. Default: the system's.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Accept any certificate, and send keys to its holder.")]


def trust(cacert: Path | None, insecure: bool) -> ssl.SSLContext:
    """Return the TLS settings for an endpoint; ends the command where the file has no certificates."""
    try:
        context = ssl.create_default_context(cafile=cacert)
    except OSError as error:
        leave(f"--cacert {cacert} holds no certificates that can be read: {error.strerror}")
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def local_url() -> str | None:
    """Return the URL of the only local deployment, ``None`` without one; ends the command where there are several."""
    try:
        return only_run()
    except UnreachableError as error:
        leave(str(error))


def only_endpoint() -> str:
    """Return the URL of the only local deployment; ends the command where there is none or several."""
    return local_url() or leave("no `mmrouter up` runs here: give the URL of an endpoint")


def is_endpoint(text: str) -> bool:
    """Return whether a text is a URL, or an address with a port, rather than the id of a request."""
    return "://" in text or re.fullmatch(r"[\w.-]+:\d+(/v1)?/?", text) is not None


def control_or_leave(url: str, control: str | None, token: str | None) -> ControlEndpoint:
    try:
        return find_control(url, control, token)
    except UnreachableError as error:
        leave(str(error))


def leave(message: str) -> NoReturn:
    typer.echo(f"mmrouter: {message}", err=True)
    raise typer.Exit(USAGE)


def output() -> Console:
    """Return a console for standard output; where that is no terminal, one in whose lines names fit."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def table(title: str | Text, *headings: str, right: Collection[str] = (), **options: Any) -> Table:
    """Return a table with these columns, in which the end of a name is never cut off."""
    made = Table(title=title, **options)
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return made
