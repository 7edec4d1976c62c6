"""The operator as the chart starts it: arguments, environment and rights; and what `helm test` asks of it."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from chart.helm import CHART, NAMESPACE, RELEASE, Helm
from cluster.controlplane import ControlPlane, end
from cluster.operators import PORT, holder
from cluster.resources import apply, complete, resource
from waiting import answers_ok, wait_for

from mmrouter_cli.local.loopback_network import can_bind

HERE = f"--namespace={NAMESPACE}"
ACCOUNT = "mmrouter-operator"


@pytest.fixture
def team(admin: Helm, server: ControlPlane) -> Iterator[str]:
    """A namespace with a release that looks after it alone."""
    with server.namespace() as name:
        admin.output("install", RELEASE, CHART, HERE, "--create-namespace", values={"watchNamespaces": [name]})
        try:
            yield name
        finally:
            admin.output("uninstall", RELEASE, HERE)


@pytest.fixture
def operator(admin: Helm, server: ControlPlane, team: str, tmp_path: Path) -> Iterator[str]:
    """Run the operator's container as a process, and return its URL."""
    made = admin.render({"watchNamespaces": [team]})
    (tmp_path / "operator.yaml").write_text(made.config)
    fields = {"metadata.name": f"{ACCOUNT}-0", "metadata.namespace": NAMESPACE}
    env = {row["name"]: fields[row["valueFrom"]["fieldRef"]["fieldPath"]] for row in made.operator["env"]}
    args = [str(arg).replace("/etc/mmrouter/", f"{tmp_path}/") for arg in made.operator["args"]]
    host, _, last = server.address.rpartition(".")
    address = next(ip for ip in (f"{host}.{n}" for n in range(253, int(last), -1)) if can_bind(ip, PORT))
    kubeconfig = server.kubeconfig_for(NAMESPACE, ACCOUNT)
    # What a pod has by its image and its account.
    outside = [f"--kubeconfig={kubeconfig}", f"--bind={address}:{PORT}"]
    assert made.operator["command"] == ["mmrouter", "operator"]
    command = [sys.executable, "-m", "mmrouter_cli", "operator"]
    process = server.spawn("operator", [*command, *args, *outside], {"PATH": "/usr/bin:/bin", **env})
    try:
        yield f"http://{address}:{PORT}"
    finally:
        end(process)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of `helm test`; its patience is none."""
    monkeypatch.syspath_prepend(CHART / "files")
    module = importlib.import_module("check")
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    return module


@pytest.fixture
def account(server: ControlPlane, tmp_path: Path) -> str:
    """The folder that a pod finds its token in."""
    (tmp_path / "token").write_text(server.token("default", "default"))
    shutil.copy(server.ca, tmp_path / "ca.crt")
    return str(tmp_path)


def test_the_rights_in_one_namespace_are_enough_there_and_reach_no_further(
    server: ControlPlane, team: str, operator: str, check: ModuleType, account: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_for(lambda: answers_ok(f"{operator}/readyz"), 60, "the operator has filled its caches")
    wait_for(lambda: holder(server).startswith(f"{ACCOUNT}-0_"), 30, "it leads, by the name of its pod")
    body = resource()
    apply(server, team, body)
    wait_for(lambda: complete(server, body, team), 30, "all children are there")

    assert check.main(operator, server.url, account) == 0
    assert "the operator is ready" in capsys.readouterr().out

    rows = [row for row in server.audit() if row.user == f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"]
    assert {row.namespace for row in rows if row.writes} == {team, NAMESPACE}
    assert [str(row) for row in rows if row.writes and row.code == 403] == []


@pytest.mark.parametrize(
    ("api", "named"),
    [("", "the operator is not ready: "), ("/nothing", "the cluster does not serve mmrouter.io/v1alpha1 (")],
    ids=["an operator that is not ready", "an API that is not served"],
)
def test_the_check_names(
    server: ControlPlane,
    team: str,
    check: ModuleType,
    account: str,
    capsys: pytest.CaptureFixture[str],
    api: str,
    named: str,
) -> None:
    assert check.main(f"http://{server.address}:{PORT}", f"{server.url}{api}", account) == 1
    assert named in capsys.readouterr().out
