"""Clients read through mmrouter what they read from a real engine: texts, usage, tools, structured answers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from clients.load_programs import REQUESTS, Guidellm, LoadProgram, VllmBench
from clients.matrix import CLIENTS, STRUCTURED, TEXTS, TOOLS, Matrix
from conformance.engines import engines
from conformance.vllm.conftest import Served
from long_form import parameters


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix.made(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("served", ["qwen2_vl"], indirect=True)
@pytest.mark.parametrize("client", parameters(CLIENTS, "openai", "anthropic"))
def test_answers_are_those_of_the_engine(matrix: Matrix, served: Served, client: str) -> None:
    _, engine = engines(served.deployment)[0]
    scenarios = (*TEXTS, STRUCTURED, TOOLS)
    # Random weights call no tool, so every client has an error to compare.
    direct = matrix.run(client, f"http://{engine.ip}:8000", engine.key, scenarios, may_fail=[TOOLS])
    assert direct
    assert matrix.run(client, served.deployment.url, "any", scenarios, may_fail=[TOOLS]) == direct


def sides(served: Served) -> list[tuple[str, str]]:
    """Return address and key of an engine, and then of mmrouter."""
    _, engine = engines(served.deployment)[0]
    return [(f"http://{engine.ip}:8000", engine.key), (served.deployment.url, "any")]


@pytest.mark.long_form
@pytest.mark.parametrize("served", ["qwen2_vl"], indirect=True)
@pytest.mark.parametrize("kind", [VllmBench, Guidellm, partial(Guidellm, image=True)])
def test_programs_for_load_read_what_the_engine_answers(
    served: Served, vllm_env: Path, tmp_path: Path, kind: Callable[..., LoadProgram]
) -> None:
    program, read = kind(vllm_env, served.folder, tmp_path), []
    for url, key in sides(served):
        program.run(url, key)
        assert program.counted() == (REQUESTS, 0)
        read.append(program.answers())
    assert read[0] == read[1]
