"""Clients read through mmrouter what they read from a real engine: texts, usage, tools, structured answers."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from artefacts import run_tool_or_skip
from clients.matrix import CLIENTS, STRUCTURED, TEXTS, TOOLS, Matrix
from conformance.engine_process import VLLM_ENVIRONMENT
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
def test_vllms_own_benchmark_reads_what_the_engine_answers(served: Served, vllm_env: Path, tmp_path: Path) -> None:
    model = ("--model", "demo", "--tokenizer", str(served.folder), "--temperature", "0", "--ignore-eos")
    load = ("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "8", "--num-prompts", "8")
    kept = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "result.json")
    read = []
    for url, key in sides(served):
        address = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url)
        command = [str(vllm_env / "bin" / "vllm"), "bench", "serve", *address, *model, *load, *kept]
        environment = {**os.environ, **VLLM_ENVIRONMENT, "OPENAI_API_KEY": key}
        subprocess.run([*command, "--max-concurrency", "1"], env=environment, check=True, timeout=1200)
        result = json.loads((tmp_path / "result.json").read_text())
        assert (result["completed"], result["total_output_tokens"]) == (8, 64)
        read.append((result["input_lens"], result["generated_texts"]))
    assert read[0] == read[1]


@pytest.mark.long_form
@pytest.mark.parametrize("served", ["qwen2_vl"], indirect=True)
@pytest.mark.parametrize(
    "data", ["synthetic_text,prompt_tokens=64,output_tokens=8", "synthetic_image,width=224,height=224"]
)
def test_guidellm_reads_what_the_engine_answers(served: Served, vllm_env: Path, tmp_path: Path, data: str) -> None:
    load = ("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8")
    tokens = ("--tokenizer", f"kind=hf_auto,model={served.folder}", "--data", f"kind={data}")
    kept = ("--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-progress")
    packages = {"PYTHONPATH": run_tool_or_skip("clients.guidellm_env"), "HOME": str(tmp_path)}
    read = []
    for url, key in sides(served):
        backend = ("--backend", f"kind=openai_http,target={url},model=demo,api_key={key}")
        command = [str(vllm_env / "bin" / "python"), "-m", "guidellm", "run", *backend, *load, *tokens, *kept]
        subprocess.run(command, env={**os.environ, **VLLM_ENVIRONMENT, **packages}, check=True, timeout=1200)
        (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (8, 0)
        read.append(sorted(_tokens(request) for request in benchmark["requests"]["successful"]))
    assert read[0] == read[1]


def _tokens(request: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of a prompt and of its answer, as the engine counted them."""
    return request["input_metrics"]["text_tokens"], request["output_metrics"]["text_tokens"]
