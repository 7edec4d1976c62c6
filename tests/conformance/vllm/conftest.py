"""The engines of each family behind a router, started once for all files, because a start takes most of the time."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from conformance.conftest import Shrunk
from conformance.engine_process import BLOCK_SIZE, Engine, env_version, require_memory
from conformance.engines import deployed, manifest, pool, served_directly, vllm_engine
from conformance.prediction import Predictor
from conformance.report import Cells
from conformance.setups import REPOSITORIES, setup_families
from local.rig import Deployment
from long_form import parameters
from waiting import wait_for

from mmrouter_lib.api import parse_deployment

SETTLE_SECONDS = 120
FOR_CLIENTS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)
"""What ``test_clients`` needs. Random weights would fill JSON with blanks."""


@dataclass(frozen=True)
class Served:
    """A family's running deployment of one or two engines. ``engine`` is one of them, asked directly; ``predictor`` is
    the library's for the model folder.

    ``test_families`` sends requests through the router. ``test_prediction`` then compares all that the one engine
    publishes with all that it received directly, so between these two nothing else may fill its cache. Rendered prompts
    do not use the cache. The test that ends the engine is the last one of ``test_tokenization``.
    """

    family: str
    folder: Path
    deployment: Deployment
    predictor: Predictor
    engine: Engine


@pytest.fixture(scope="session", params=parameters(REPOSITORIES, "qwen2_vl"))
def served(
    request: pytest.FixtureRequest, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory, cells: Cells
) -> Iterator[Served]:
    family: str = request.param
    with ExitStack() as running:
        with cells.of("vllm", family, "uuid of ours") as cell:
            vllm_env: Path = request.getfixturevalue("vllm_env")  # inside the cell, so that a skip becomes its reason
            cell.version = env_version(vllm_env)
            replicas = 2 if family in setup_families() else 1
            require_memory(engines=replicas)
            began = time.monotonic()
            folder = shrunk(REPOSITORIES[family])
            workers = [pool("worker", replicas=replicas)]
            made = manifest(folder, vllm_engine(folder, *FOR_CLIENTS), workers, repository=REPOSITORIES[family])
            deployment = running.enter_context(deployed(vllm_env, tmp_path_factory.mktemp(family), made))
            wait_for(deployment.settled, SETTLE_SECONDS, "every engine is verified")
            direct = running.enter_context(served_directly(deployment))
            direct.start_s = time.monotonic() - began
        yield Served(
            family,
            folder,
            deployment,
            replace(
                Predictor.load(folder, BLOCK_SIZE, limits=parse_deployment(made).spec.engine.processor),
                model=direct.model,
            ),
            direct,
        )
