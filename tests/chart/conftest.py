"""The helm of these tests, and a control plane of their own that serves no CRD of ours at first.

Where one cannot be made here, the tests that need it say ``not run:`` and why.
"""

from collections.abc import Iterator

import pytest
from artefacts import go_programs, name_needs
from chart.helm import Helm
from cluster.controlplane import ControlPlane, control_plane


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    name_needs(items, {"helm", "server"})


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm, with a home of its own."""
    return Helm(go_programs("helm") / "helm", tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running control plane without CRDs."""
    with control_plane(tmp_path_factory.mktemp("server"), go_programs("kubernetes"), None) as plane:
        yield plane


@pytest.fixture
def admin(helm: Helm, server: ControlPlane) -> Helm:
    """Helm as the control plane's administrator."""
    return helm.at(server.kubeconfig)
