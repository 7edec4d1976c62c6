"""The one-node cluster and the images of the tests that run real pods. Where they cannot be made, tests say why."""

import os
import shutil
import subprocess
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from artefacts import Record, build_images, go_programs, name_needs, run_tool_or_skip, shared_images
from chart.helm import CHART, NAMESPACE, RELEASE, Helm
from cluster.access import Access, existing
from e2e.deploying import ROOT, Deployed, deployment, example
from e2e.images import write_pause
from e2e.node import Node, Programs, node
from e2e.report import Dumps, Place, dump

from hack.cluster.go_programs import cni_folder

DUMPS = pytest.StashKey[Dumps]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    name_needs(items, {"cluster", "programs", "sourced_file"})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    def section(title: str, lines: Iterable[str]) -> None:
        if entries := list(lines):
            terminalreporter.section(title)
            for line in entries:
                terminalreporter.write_line(line)

    if (dumps := config.stash.get(DUMPS, None)) is not None:
        section("what each pod waited for", dumps.booted)
        section("what is known of failures", (f"{test}: {folder}" for test, folder in dumps.folders.items()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write what is known while it is there: namespaces that a fixture holds, and the operator's own."""
    report = yield
    dumps = item.config.stash.get(DUMPS, None)
    if report.failed and dumps is not None and dumps.places:
        folder = dumps.write(item.nodeid)
        (folder / f"{report.when}.txt").write_text(report.longreprtext)  # pytest shows it when all have run
        report.sections.append(("what is known of it", str(folder)))
    return report


@pytest.fixture(scope="session")
def dumps(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    """What writes down everything that is known of a failed test, into a folder of its own in ``MMROUTER_DUMP_DIR``."""
    named = os.environ.get("MMROUTER_DUMP_DIR")
    made = Dumps(Path(named).resolve() if named else tmp_path_factory.mktemp("dumps"))
    pytestconfig.stash[DUMPS] = made
    return made


@pytest.fixture(scope="session")
def programs() -> Programs:
    node_bin = go_programs("node")  # first: it names what the machine lacks
    cni = cni_folder()
    assert cni  # the build of the node's commands has checked
    return Programs(go_programs("kubernetes"), node_bin, cni)


@pytest.fixture(scope="session")
def revision() -> str:
    """The commit that the images are built from, empty where this is no checkout of git."""
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip() if git.returncode == 0 else ""


@pytest.fixture(scope="session")
def images(
    programs: Programs, tmp_path_factory: pytest.TempPathFactory, record: Record, revision: str
) -> Iterator[list[Path]]:
    kept, folder = shared_images(), None
    archives = sorted(kept.glob("*.tar")) if kept is not None else []
    if not archives:
        folder = tmp_path_factory.mktemp("images")
        began = time.monotonic()
        archives = build_images(folder, run_tool_or_skip)
        record("images built in, s", round(time.monotonic() - began, 1))
    for archive in archives:
        record(f"image {archive.stem}, MB", archive.stat().st_size // 10**6)
    yield archives
    if folder is not None:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def bare(programs: Programs, tmp_path_factory: pytest.TempPathFactory, record: Record, dumps: Dumps) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    dumps.places[""] = Place((folder / "run" / "log",))  # first: a node that does not start has logs, too
    write_pause(folder / "pause.tar")
    began = time.monotonic()
    with node(folder / "run", programs, folder / "pause.tar") as made:
        record("node Ready in, s", round(time.monotonic() - began, 1))
        yield made


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dumps: Dumps) -> Iterator[Access]:
    """A cluster that has the project's images: the one of ``MMROUTER_KUBECONFIG``, or a node of our own."""
    with ExitStack() as stack:
        if named := os.environ.get("MMROUTER_KUBECONFIG"):
            bin = Path(shutil.which("kubectl") or go_programs("kubernetes") / "kubectl").parent
            made = stack.enter_context(existing(tmp_path_factory.mktemp("existing"), bin, Path(named)))
        else:
            for archive in request.getfixturevalue("images"):
                request.getfixturevalue("bare").load(archive)
            made = request.getfixturevalue("bare")
        stack.enter_context(dumps.sharing(made))
        yield made


@pytest.fixture(scope="session")
def operated(cluster: Access, tmp_path_factory: pytest.TempPathFactory, record: Record) -> Iterator[Access]:
    # Always this one: the machine's own may be of another major version.
    helm = Helm(go_programs("helm") / "helm", tmp_path_factory.mktemp("helm"), cluster.kubeconfig)
    if helm.run("status", RELEASE, f"--namespace={NAMESPACE}").returncode == 0:
        yield cluster  # a release that these tests did not install stays as it is
        return
    began = time.monotonic()
    done = helm.run("install", RELEASE, CHART, f"--namespace={NAMESPACE}", "--create-namespace")
    assert done.returncode == 0, done.stderr
    done = cluster.kubectl("-n", NAMESPACE, "wait", "--for=condition=Available", "deploy", "--all", "--timeout=300s")
    assert done.returncode == 0, dump(cluster, NAMESPACE)
    record("operator available after helm install, s", round(time.monotonic() - began, 1))
    yield cluster
    helm.run("uninstall", RELEASE, f"--namespace={NAMESPACE}")


@pytest.fixture(scope="session")
def deployed(operated: Access, record: Record) -> Iterator[Deployed]:
    """The deployment of ``examples/kind.yaml``, in a namespace that lets only restricted pods in."""
    began = time.monotonic()
    with deployment(operated, example()) as made:
        record("deployment Ready and proved after apply, s", round(time.monotonic() - began, 1))
        yield made
