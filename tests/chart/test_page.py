"""The commands of docs/install.md, in their order, on a real API server.

No pod runs there, so nothing is waited for, and `helm test` is replaced by the question whether there is a test to run.
"""

import os
import subprocess
from collections.abc import Iterator

import pytest
from artefacts import go_programs
from chart.helm import Helm
from chart.test_install import forget_definition
from cluster.controlplane import ControlPlane
from cluster.resources import apply, resource
from doc_commands import CHART_PAGE, ROOT, commands

FOUND = [command for page, command in commands() if page == CHART_PAGE]
TEAM = "team-a"


@pytest.fixture
def fresh(admin: Helm, server: ControlPlane) -> Iterator[ControlPlane]:
    for name in (TEAM, "inference"):
        server.request(
            "POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        )
    forget_definition(server)
    yield server
    admin.run("uninstall", "mmrouter", f"--namespace={TEAM}")
    forget_definition(server)


def test_every_command_of_the_page_succeeds_in_its_order(fresh: ControlPlane, helm: Helm) -> None:
    assert len(FOUND) >= 8
    path = f"{helm.command.parent}:{go_programs('kubernetes')}:{os.environ['PATH']}"
    env = os.environ | {"KUBECONFIG": str(fresh.kubeconfig), "PATH": path, "HOME": str(helm.home)}
    for command in FOUND:
        if "kubectl delete mmrouterdeployment" in command:
            apply(fresh, "inference", resource("qwen-vl"))
        typed = command.replace(" --wait", "").replace("helm test", "helm get hooks")
        done = subprocess.run(["bash", "-c", typed], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if "helm test" in command:
            assert "kind: Pod" in done.stdout
