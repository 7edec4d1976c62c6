"""The helm of these tests, and a control plane of their own that serves no CRD of ours at first.

Where one cannot be made here, the tests that need it say ``not run:`` and why.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chart.helm import Helm
from cluster.controlplane import ControlPlane, control_plane

TOOLS = Path(__file__).resolve().parents[1] / "tools"
CANNOT = 3  # exit status of the tools: not on this machine, reason on stderr


def made_by(tool: str) -> Path:
    """Return the folder that a tool makes or finds; skips the test where it cannot."""
    made = subprocess.run([sys.executable, str(TOOLS / tool)], capture_output=True, text=True, check=False)
    if made.returncode == CANNOT:
        pytest.skip(f"not run: {made.stderr.strip().splitlines()[-1]}")
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm, with a home of its own."""
    return Helm(made_by("helm_env.py") / "helm", tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running control plane without CRDs."""
    with control_plane(tmp_path_factory.mktemp("server"), made_by("kube_env.py"), None) as plane:
        yield plane


@pytest.fixture
def admin(helm: Helm, server: ControlPlane) -> Helm:
    """Helm as the control plane's administrator."""
    return helm.at(server.kubeconfig)
