"""The control plane that the tests of this level share. Where it cannot run, every test says ``not run:`` and why."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from artefacts import go_programs, name_needs
from cluster.controlplane import ControlPlane, control_plane
from cluster.hollow_kubelet import Hollow, hollow
from cluster.load import describe
from cluster.operators import Replica, operator
from cluster.resources import apply, is_done, marked
from cluster.runner import LocalRunner
from waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
CRDS = ROOT / "crds"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    name_needs(items, {"kube_bin"})


@pytest.fixture(scope="session")
def kube_bin() -> Path:
    return go_programs("kubernetes")


@pytest.fixture(scope="session")
def cluster(kube_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("cluster"), kube_bin, CRDS if CRDS.is_dir() else None) as plane:
        yield plane


@pytest.fixture(scope="session")
def crd(cluster: ControlPlane) -> ControlPlane:
    assert CRDS.is_dir(), "crds/ is missing: make it with `mmrouter crd`"
    return cluster


@pytest.fixture(scope="session")
def real(kube_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of its own with a node whose pods run as processes, and an operator."""
    with control_plane(tmp_path_factory.mktemp("real"), kube_bin, CRDS) as plane:
        runner = LocalRunner(plane, ROOT / "examples")
        with hollow(plane, runner) as kubelet, operator(plane):
            kubelet.node("local", {"nvidia.com/gpu.present": "true"}, {"nvidia.com/gpu": "1"})
            yield plane


@pytest.fixture(scope="session")
def proved(real: ControlPlane) -> Iterator[str]:
    """The namespace of a deployment ``demo`` that runs, is ready and proved; tests share it and change it."""
    with real.namespace() as name:
        generation = apply(real, name, marked())["metadata"]["generation"]
        done = partial(is_done, real, name, "demo", generation)
        wait_for(done, 90, "Ready is True", known=partial(describe, real, name))
        yield name


@pytest.fixture(scope="session")
def large(kube_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with control_plane(tmp_path_factory.mktemp("large"), kube_bin, CRDS) as plane, operator(plane) as replica:
        yield replica


@pytest.fixture
def namespace(cluster: ControlPlane) -> Iterator[str]:
    with cluster.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def kubelet(cluster: ControlPlane) -> Iterator[Hollow]:
    """A hollow kubelet with two nodes that have GPUs."""
    with hollow(cluster) as made:
        for name in ("node-0", "node-1"):
            made.node(name, {"nvidia.com/gpu.present": "true"}, {"nvidia.com/gpu": "64"})
        yield made
