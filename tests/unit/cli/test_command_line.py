"""The entry point: how a command ends early, the page of options, `mmrouter crd`, and where a deployment is found."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
import yaml
from typer.core import TyperArgument, TyperGroup
from typer.testing import CliRunner
from waiting import wait_for

from mmrouter_cli.__main__ import WITHOUT_OPTIONS, main
from mmrouter_cli.app import app
from mmrouter_cli.cluster.reader import ClusterError, namespace_of, reading
from mmrouter_cli.local.folders import network_namespace
from mmrouter_cli.options import is_endpoint
from mmrouter_cli.status.control_api import ControlEndpoint, UnreachableError, find_control
from mmrouter_lib import __version__
from mmrouter_lib.api.crd import definition


@pytest.mark.parametrize("command", WITHOUT_OPTIONS)
@pytest.mark.parametrize(("option", "status"), [("--help", 0), ("--config=x", 2)])
def test_a_containers_command_says_that_it_takes_no_options(
    command: str, option: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["mmrouter", command, option])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == status
    assert "takes no options" in capsys.readouterr().err


UNSHARE = ("unshare", "--pid", "--fork", "--kill-child")


@pytest.fixture
def first() -> tuple[str, ...]:
    """What a command line begins with to be the first process of its namespace, as a container's command is."""
    if not shutil.which("unshare") or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("not run: this user makes no namespace of processes")
    return UNSHARE


@contextmanager
def held_up(fifo: Path, *command: str, **env: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a command that reads a FIFO; it is in the midst of its start until this ends."""
    os.mkfifo(fifo)
    process = subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.PIPE)
    try:
        writer = wait_for(lambda: opened(fifo), 30, "the command reads the FIFO")
        yield process
        os.close(writer)
    finally:
        process.kill()
        process.communicate()


def opened(fifo: Path) -> int | None:
    """Open a FIFO for writing, once a process reads it."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def test_a_container_that_is_still_starting_ends_at_sigterm(first: tuple[str, ...], tmp_path: Path) -> None:
    env = {"MMROUTER_CONFIG": str(tmp_path), "POD_UID": "1"}
    command = (*first, sys.executable, "-m", "mmrouter_cli", "router")
    with held_up(tmp_path / "deployment.json", *command, **env) as process:
        (child,) = psutil.Process(process.pid).children()
        child.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


def test_a_command_that_is_stopped_while_it_is_imported_leaves_no_trace_of_that(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(f"open({str(tmp_path / 'fifo')!r}).read()\n")
    # As a shell starts it in the foreground, also where these tests run in the background.
    command = ("env", "--default-signal=INT", sys.executable, "-m", "mmrouter_cli", "bench")
    with held_up(tmp_path / "fifo", *command, PYTHONPATH=str(tmp_path)) as process:
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=600)
    assert (process.returncode, shown) == (128 + signal.SIGINT, b"")


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
SECTIONS = dict(re.findall(r"^## mmrouter ([\w-]+)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))
GROUP = typer.main.get_command(app)
assert isinstance(GROUP, TyperGroup)
COMMANDS: dict[str, Any] = GROUP.commands


def table(name: str) -> str:
    """The first column of a command's table of options."""
    rows = re.findall(r"^\| (`.*?) \|", SECTIONS[name], re.MULTILINE)
    return "\n".join(rows)


def test_the_page_has_a_section_for_every_command() -> None:
    assert SECTIONS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_section_has_every_argument_and_option_and_no_other(name: str) -> None:
    parameters = [parameter for parameter in COMMANDS[name].params if parameter.name != "help"]
    options = {parameter.opts[0] for parameter in parameters if not isinstance(parameter, TyperArgument)}
    arguments = {parameter.name.upper() for parameter in parameters if isinstance(parameter, TyperArgument)}
    assert set(re.findall(r"`(--[a-z-]+)`", table(name))) == options
    assert set(re.findall(r"`([A-Z_]+)`", table(name))) == arguments


CRD = Path(__file__).resolve().parents[3] / "crds" / "mmrouter.io_mmrouterdeployments.yaml"


def test_what_is_printed_is_the_definition_and_every_time_the_same() -> None:
    first, second = CliRunner().invoke(app, ["crd"]), CliRunner().invoke(app, ["crd"])
    assert first.exit_code == 0
    assert first.output == second.output
    assert yaml.safe_load(first.output) == definition()


@pytest.mark.parametrize(
    ("file", "status", "says"),
    [(CRD, 0, ""), (Path("differs.yaml"), 1, "mmrouter crd > differs.yaml"), (Path("none.yaml"), 2, "cannot read")],
)
def test_only_the_file_in_crds_passes_the_check_and_one_that_differs_by_a_byte_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path, status: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("differs.yaml").write_text(CRD.read_text() + "\n")
    result = CliRunner().invoke(app, ["crd", "--check", str(file)])
    assert (result.exit_code, says in result.output, bool(result.output)) == (status, True, bool(says))


URL = "http://demo"


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the configuration in a frontend's pod."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "control.token").write_text("secret\n")
    monkeypatch.setenv("MMROUTER_CONFIG", str(tmp_path))
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    monkeypatch.delenv("MMROUTER_CONTROL_TOKEN", raising=False)
    return tmp_path


@pytest.mark.parametrize(("ip", "host"), [("10.1.2.3", "10.1.2.3"), ("fd00::7", "[fd00::7]")])
def test_in_a_frontends_pod_its_own_control_port_is_taken(
    pod: Path, monkeypatch: pytest.MonkeyPatch, ip: str, host: str
) -> None:
    monkeypatch.setenv("POD_IP", ip)
    assert find_control(f"{URL}/v1", None, None) == ControlEndpoint(URL, (f"http://{host}:8001",), "secret")


def test_what_is_named_counts_more_than_the_own_pod(pod: Path) -> None:
    assert find_control(URL, "http://10.9.9.9:8001/", "other") == ControlEndpoint(
        URL, ("http://10.9.9.9:8001",), "other"
    )


def test_elsewhere_the_error_says_what_to_give(pod: Path) -> None:
    (pod / "secrets" / "control.token").unlink()
    with pytest.raises(UnreachableError, match="--control and --token"):
        find_control(URL, None, None)
    with pytest.raises(UnreachableError, match="--control needs --token too"):
        find_control(URL, "http://10.9.9.9:8001", None)


def test_elsewhere_the_error_names_what_runs_on_this_machine(
    pod: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pod / "secrets" / "control.token").unlink()
    monkeypatch.setattr("mmrouter_cli.status.control_api.run_root", lambda: tmp_path / "runs")
    with pytest.raises(UnreachableError, match="none runs here"):
        find_control("127.1.0.1:8000", None, None)
    (tmp_path / "runs" / "ending").mkdir(parents=True)
    (tmp_path / "runs" / "ending" / "run.json").write_text("{")
    described_run(tmp_path / "runs" / "demo", "/nowhere")
    with pytest.raises(UnreachableError, match=r"\(there is http://127\.1\.0\.1:8000\)"):
        find_control("127.1.0.1:8000", None, None)


def test_a_deployment_with_the_same_address_in_another_network_is_not_taken_for_the_one_here(
    pod: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmrouter_cli.status.control_api.run_root", lambda: tmp_path / "runs")
    for name, network in (("a", 1), ("b", network_namespace())):
        (tmp_path / name).write_text(f"token-{name}\n")
        described_run(tmp_path / "runs" / name, str(tmp_path / name), network)
    assert find_control("http://127.1.0.1:8000", None, None).token == "token-b"


def described_run(folder: Path, token_file: str, network: int | None = None) -> None:
    run = {"endpoint": "http://127.1.0.1:8000", "frontends": [], "control_token": token_file}
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run | {"network": network or network_namespace()}))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of local runs, and no cluster."""
    monkeypatch.setattr("mmrouter_cli.status.control_api.run_root", lambda: tmp_path / "runs")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "MMROUTER_CONTROL_TOKEN", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "runs"


def add_run(runs: Path, name: str, endpoint: str) -> None:
    folder = runs / name
    folder.mkdir(parents=True)
    (folder / "token").write_text("secret")
    frontend = {"url": endpoint, "control": endpoint.replace(":8000", ":8001")}
    run = {"endpoint": endpoint, "frontends": [frontend], "control_token": str(folder / "token")}
    run["network"] = network_namespace()
    (folder / "run.json").write_text(json.dumps(run))


LOCAL = "http://127.0.0.1:8000"
"""Nothing listens on its control port 8001."""


@pytest.mark.parametrize(
    ("command", "status"),
    [(("status",), 1), (("doctor",), 0), (("explain", "last"), 2), (("explain",), 2), (("verify",), 1)],
)
def test_without_a_url_the_only_local_deployment_is_taken(runs: Path, command: tuple[str, ...], status: int) -> None:
    elsewhere = CliRunner().invoke(app, command)
    assert elsewhere.exit_code == 2, "none runs here, and there is no cluster"
    add_run(runs, "one", LOCAL)
    taken = CliRunner().invoke(app, command)
    assert (taken.exit_code, "127.0.0.1:800" in taken.output) == (status, True)
    add_run(runs, "two", "http://127.0.0.2:8000")
    several = CliRunner().invoke(app, command)
    assert (several.exit_code, "several deployments run here" in several.output) == (2, True)


def test_a_name_is_looked_up_on_the_cluster_although_a_deployment_runs_here(runs: Path) -> None:
    add_run(runs, "one", LOCAL)
    for command in ("status", "doctor"):
        result = CliRunner().invoke(app, [command, "vl"])
        assert (result.exit_code, "no cluster is configured" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("http://x", True), ("127.1.0.1:8000", True), ("host:80/v1", True), ("last", False), ("chatcmpl-a", False)],
)
def test_an_endpoint_is_no_request_id(text: str, expected: bool) -> None:
    assert is_endpoint(text) is expected


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "127.0.0.1:8000/v1/", "http://127.0.0.1:8000"])
def test_a_url_needs_no_scheme(runs: Path, url: str) -> None:
    add_run(runs, "one", LOCAL)
    found = ControlEndpoint(LOCAL, ("http://127.0.0.1:8001",), "secret", is_local=True)
    assert find_control(url, None, None) == found
    assert find_control(url, "127.0.0.1:8001", "secret") == replace(found, is_local=False)


def test_an_address_is_measured_and_a_file_is_read(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    address = CliRunner().invoke(app, ["bench", "127.0.0.1:9", "--requests", "1"])
    assert "http://127.0.0.1:9" in address.output
    file = CliRunner().invoke(app, ["bench", "result.json"])
    assert "neither a URL nor a file" in file.output


@pytest.mark.parametrize("option", ["--html", "--json"])
@pytest.mark.parametrize("path", [".", "none/page.html"])
def test_a_result_that_could_not_be_written_ends_bench_before_it_measures(
    option: str, path: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["bench", "http://127.0.0.1:9", option, str(tmp_path / path)])
    assert (result.exit_code, "cannot write" in result.output) == (2, True)


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS)])
def test_every_command_explains_itself_by_both_options(name: str) -> None:
    long, short = (CliRunner().invoke(app, [*name.split(), option]) for option in ("--help", "-h"))
    assert (short.exit_code, short.output) == (0, long.output)


@pytest.mark.parametrize("command", ["plugin", "shared-memory"])
def test_a_containers_command_with_arguments_explains_itself(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["mmrouter", command, "-h"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert f"mmrouter {command} FOLDER" in capsys.readouterr().out


def test_the_version_is_printed_without_importing_the_commands() -> None:
    code = "import sys; sys.argv = ['mmrouter', '--version']\n"
    code += "import mmrouter_cli.__main__ as entry\n"
    code += "try: entry.main()\nfinally: print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    version, modules = shown.splitlines()
    assert version == __version__
    assert not {"typer", "httpx", "pydantic", "yaml", "asyncio"} & set(modules.split())


CONTEXT = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:9"}}]
users: [{name: u, user: {}}]
contexts: [{name: x, context: {cluster: c, user: u, namespace: team-a}}]
current-context: x
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: b: c", "is no kubeconfig: mapping values are not allowed here"),
        ("", "is no kubeconfig"),
        ("- a list", "is no kubeconfig"),
        ("a page of words", "is no kubeconfig"),
        ("contexts: []\nclusters: []\nusers: []\ncurrent-context: nope", "Expected object with name nope"),
    ],
)
async def test_a_file_that_is_no_kubeconfig_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    assert namespace_of(file) == "default"
    with pytest.raises(ClusterError, match=f"^no way to the cluster: .*{says}") as raised:
        async with reading(file):
            pass
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_a_missing_file_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none"
    assert namespace_of(file) == "default"
    with pytest.raises(ClusterError, match="there is no file"):
        async with reading(file):
            pass
    assert capfd.readouterr().err == ""


def test_the_current_contexts_namespace_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(CONTEXT)
    assert namespace_of(tmp_path / "config") == "team-a"
