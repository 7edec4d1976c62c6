"""Runs the two programs for load, which are installed for the interpreter of vLLM's environment."""

import json
import os
import subprocess
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artefacts import run_tool_or_skip
from conformance.engine_process import VLLM_ENVIRONMENT

REQUESTS, TOKENS = 8, 8  # of a run, and of each answer
SECONDS = 1200.0  # ends a hang


@dataclass(frozen=True)
class LoadProgram(ABC):
    """A program in vLLM's ``environment``. ``tokenizer``: a folder. ``folder``: for the result."""

    environment: Path
    tokenizer: Path
    folder: Path

    @abstractmethod
    def command(self, url: str, key: str, tokens: int) -> tuple[list[str], dict[str, str]]:
        """Return the command for answers of so many tokens, and the variables that it needs."""

    @abstractmethod
    def counted(self) -> tuple[int, int]:
        """Return how many requests the result counts as answered and as failed."""

    @abstractmethod
    def answers(self) -> Any:
        """Return what the result has of the answers, in an order that each run has."""

    def start(self, url: str, key: str, tokens: int = TOKENS) -> "subprocess.Popen[bytes]":
        command, variables = self.command(url, key, tokens)
        return subprocess.Popen(command, env={**os.environ, **VLLM_ENVIRONMENT, **variables})

    def run(self, url: str, key: str) -> None:
        process = self.start(url, key)
        try:
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()

    def _result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result


@dataclass(frozen=True)
class VllmBench(LoadProgram):
    """``vllm bench serve``, one request at a time."""

    def command(self, url: str, key: str, tokens: int) -> tuple[list[str], dict[str, str]]:
        address = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url)
        model = ("--model", "demo", "--tokenizer", str(self.tokenizer), "--temperature", "0", "--ignore-eos")
        lengths = ("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", str(tokens))
        load = ("--num-prompts", str(REQUESTS), "--max-concurrency", "1")
        kept = (
            "--save-result",
            "--save-detailed",
            "--result-dir",
            str(self.folder),
            "--result-filename",
            "result.json",
        )
        program = str(self.environment / "bin" / "vllm")
        return [program, "bench", "serve", *address, *model, *lengths, *load, *kept], {"OPENAI_API_KEY": key}

    def counted(self) -> tuple[int, int]:
        result = self._result()
        return result["completed"], result["failed"]

    def answers(self) -> Any:
        result = self._result()
        assert result["total_output_tokens"] == REQUESTS * TOKENS
        return result["input_lens"], result["generated_texts"]


@dataclass(frozen=True)
class Guidellm(LoadProgram):
    """guidellm, two requests at a time, of texts or with an ``image``."""

    image: bool = False

    def command(self, url: str, key: str, tokens: int) -> tuple[list[str], dict[str, str]]:
        backend = ("--backend", f"kind=openai_http,target={url},model=demo,api_key={key}")
        load = ("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}")
        kind = "synthetic_image,width=224,height=224" if self.image else "synthetic_text,prompt_tokens=64"
        tokenizer = ("--tokenizer", f"kind=hf_auto,model={self.tokenizer}")
        data = ("--data", f"kind={kind},output_tokens={tokens}", *tokenizer)
        kept = ("--output", f"kind=json,path={self.folder / 'result.json'}", "--disable-progress")
        command = [str(self.environment / "bin" / "python"), "-m", "guidellm", "run", *backend, *load, *data, *kept]
        variables = {"PYTHONPATH": run_tool_or_skip("clients.guidellm_env"), "HOME": str(self.folder)}
        return command, variables

    def counted(self) -> tuple[int, int]:
        totals = self._benchmark()["metrics"]["request_totals"]
        return totals["successful"], totals["errored"]

    def answers(self) -> Any:
        def tokens(request: dict[str, Any]) -> tuple[int, int]:
            return request["input_metrics"]["text_tokens"], request["output_metrics"]["text_tokens"]

        return sorted(tokens(request) for request in self._benchmark()["requests"]["successful"])

    def _benchmark(self) -> dict[str, Any]:
        (benchmark,) = self._result()["benchmarks"]
        return dict(benchmark)
