"""The helm of these tests, and a control plane of their own that serves no CRD of ours at first.

Where one cannot be made here, the tests that need it say ``not run:`` and why.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from artefacts import made_by, name_needs
from chart.helm import Helm
from cluster.controlplane import ControlPlane, control_plane


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    name_needs(items, {"helm", "server"})


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm, with a home of its own."""
    return Helm(Path(made_by("helm_env.py"), "helm"), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running control plane without CRDs."""
    with control_plane(tmp_path_factory.mktemp("server"), Path(made_by("kube_env.py")), None) as plane:
        yield plane


@pytest.fixture
def admin(helm: Helm, server: ControlPlane) -> Helm:
    """Helm as the control plane's administrator."""
    return helm.at(server.kubeconfig)
