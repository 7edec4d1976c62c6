"""The real engine's environment, the shrunk models, and the figures of a run.

A level that cannot run says why: every skip below begins with ``not run:``.
"""

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from artefacts import name_needs, run_tool_or_skip
from conformance.releases import Adoption, adoption
from conformance.report import Cells, run_folder
from conformance.setups import TINY, TINY_MODEL, named_families, proved_cells
from local.rig import Deployment
from scenarios import Chat, open_chat, web

from hack.engines.shrink_model import shrink

ROOT = Path(__file__).resolve().parents[2]
__all__ = ["web"]
collect_ignore = [] if os.environ.get("MMROUTER_FAMILIES") else ["test_cells.py"]
CELLS = pytest.StashKey[list[Cells]]()
FIGURES = pytest.StashKey[dict[str, object]]()
ADOPTION = pytest.StashKey[Adoption | None]()


Shrunk = Callable[[str], Path]
Figure = Callable[[str, object], None]


def models_dir() -> Path:
    return Path(os.environ.get("MMROUTER_MODELS") or ROOT.parent / "shared" / "models")


def model_folder(name: str) -> Path:
    """Return a real model's folder, ``org--name``; skips the test without it."""
    folder = models_dir() / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"not run: no model folder {name} in MMROUTER_MODELS")
    return folder


def pytest_configure(config: pytest.Config) -> None:
    named_families()  # an unknown name ends the run
    config.stash[CELLS] = []
    config.stash[ADOPTION] = adoption()
    config.addinivalue_line("markers", "adopts(engine, check): part of `make adopt` for an engine's release")
    config.addinivalue_line("markers", "proves(engine, setup, family): the cell of the page that a test proves")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    name_needs(items, {"shrunk", "vllm_env", "newer_vllm_env", "sglang_env", "older_sglang_env"})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    figures = item.stash.get(FIGURES, {})
    if adopted := item.config.stash[ADOPTION]:
        adopted.add(item, report, figures, call.excinfo.value if call.excinfo else None)
    for cells in item.config.stash[CELLS]:
        for cell in proved_cells(item):
            cells.proof(cell, item.name, report, figures)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[CELLS]:
        terminalreporter.section("conformance")
        for line in config.stash[CELLS][0].lines():
            terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def cells(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """The cells of the run's table, kept in ``MMROUTER_CONFORMANCE_DIR`` or else in the run's temporary folder."""
    folder = os.environ.get("MMROUTER_CONFORMANCE_DIR")
    made = Cells(ROOT / folder if folder else tmp_path_factory.getbasetemp(), run_folder())
    pytestconfig.stash[CELLS].append(made)
    return made


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Keep a figure for the cell that the test proves, and for its row in `make adopt`."""
    node: pytest.Item = request.node
    return node.stash.setdefault(FIGURES, {}).__setitem__


@pytest.fixture(scope="session")
def vllm_env() -> Path:
    """The environment with the real vLLM, made when it is not there yet and there is a model to serve with it; in
    `make adopt` the code of the release that it is about.
    """
    return engine_env(f"engines.{'newer_' * ('MMROUTER_VLLM_WHEEL' in os.environ)}vllm_env")


@pytest.fixture(scope="session")
def newer_vllm_env() -> Path:
    """The code of a vLLM whose hashes cover the next tokens beside a drafter, to be run without a model."""
    return engine_env("engines.newer_vllm_env")


@pytest.fixture(scope="session")
def sglang_env() -> Path:
    return engine_env(f"engines.{'older_' * ('MMROUTER_SGLANG_WHEEL' in os.environ)}sglang_env")


@pytest.fixture(scope="session")
def older_sglang_env() -> Path:
    """SGLang of a release that writes one sentinel per image."""
    return engine_env("engines.older_sglang_env")


def engine_env(script: str) -> Path:
    if not models_dir().is_dir():
        pytest.skip(f"not run: no model folders at {models_dir()} (MMROUTER_MODELS)")
    return Path(run_tool_or_skip(script))


@pytest.fixture(scope="session")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Shrunk:
    """Give a shrunk copy of a model folder, named by its repository (``org/name``)."""
    root = tmp_path_factory.mktemp("models")

    def make(repository: str) -> Path:
        name = repository.replace("/", "--")
        source = TINY_MODEL if repository == TINY else model_folder(name)
        out = root / name
        if not out.exists():
            shrink(source, out)
        return out

    return make


@pytest.fixture
def chat(deployment: Deployment) -> Iterator[Chat]:
    """A conversation with the deployment of the test's module."""
    with open_chat(deployment, max_retries=0) as chat:
        yield chat
