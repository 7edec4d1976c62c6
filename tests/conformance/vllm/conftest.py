"""One engine per family, started once for all test files, because a start takes longer than most tests."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from conformance.conftest import Shrunk
from conformance.engine_process import BLOCK_SIZE, RENDERS, Engine, engine, env_version
from conformance.prediction import Predictor
from conformance.report import Cells

FAMILIES = {
    "qwen2_vl": "Qwen/Qwen2-VL-2B-Instruct",
    "qwen2_5_vl": "Qwen/Qwen2.5-VL-7B-Instruct",
    "qwen3_vl": "Qwen/Qwen3-VL-2B-Instruct",
    "llava": "llava-hf/llava-1.5-7b-hf",
    "llava_next": "llava-hf/llava-v1.6-mistral-7b-hf",
    "phi3_v": "microsoft/Phi-3-vision-128k-instruct",
}
ROOM = {"phi3_v": ("--max-num-batched-tokens", "8192")}
"""Families whose vision tower vLLM builds at its real width: a larger step runs the tower less often."""


@dataclass(frozen=True)
class Served:
    """A family's running engine and the library's predictor for its model folder. ``test_prediction`` compares
    everything that the engine publishes with everything that it received, so only its workload may fill the cache.
    Rendered prompts do not use the cache. The test that ends the engine is the last one of ``test_tokenization``.
    """

    family: str
    folder: Path
    predictor: Predictor
    engine: Engine


@pytest.fixture(scope="session", params=list(FAMILIES))
def served(
    request: pytest.FixtureRequest, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory, cells: Cells
) -> Iterator[Served]:
    family: str = request.param
    with ExitStack() as running:
        with cells.of("vllm", family, "uuid of ours") as cell:
            vllm_env: Path = request.getfixturevalue("vllm_env")  # inside the cell, so that a skip becomes its reason
            cell.version = env_version(vllm_env)
            folder = shrunk(FAMILIES[family])
            log = tmp_path_factory.mktemp(family) / "engine.log"
            started = running.enter_context(engine(vllm_env, folder, log, RENDERS, *ROOM.get(family, ())))
        yield Served(family, folder, Predictor.load(folder, BLOCK_SIZE), started)
