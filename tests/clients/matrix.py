"""Runs each client library of the matrix in a process of its own, against an address, and reads its answers."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artefacts import run_tool_or_skip

from mmrouter_cli.sample_images import picture

HERE = Path(__file__).parent
NODE = ("openai-node", "anthropic-node", "ai-sdk")
CHATS = ("openai", "anthropic", "langchain", "litellm", "llama-index", "pydantic-ai", "huggingface-hub", *NODE)
CLIENTS = (*CHATS, "instructor")  # which has structured answers only
TEXT, ABOUT_IMAGE, SHORT, STORY_TOKENS = "Say hello.", "What is this?", 8, 400
"""As in the clients' scripts: what they ask, and tokens of an answer and of a story that they leave."""
TEXTS = ("chat", "stream", "image", "completion", "responses", "models", "count")
STRUCTURED, TOOLS = "structured", "tools"
SECONDS = 600.0  # ends a hang
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LANGSMITH_TRACING": "false"}
"""Libraries that would ask other hosts at their start."""


@dataclass(frozen=True)
class Matrix:
    """The clients' environment, and the image that they send."""

    environment: Path
    image: Path

    @classmethod
    def made(cls, folder: Path) -> "Matrix":
        """Build the environment where it is missing; skips the test where it cannot be built."""
        environment = Path(run_tool_or_skip("clients.client_env"))
        (image := folder / "image.png").write_bytes(picture("matrix", 112, 112))
        return cls(environment, image)

    def start(self, client: str, url: str, key: str, scenarios: Sequence[str]) -> "subprocess.Popen[str]":
        """Start a client's scenarios against an address without ``/v1``."""
        variables = {"URL": url, "KEY": key, "MODEL": "demo", "IMAGE": self.image, "NODE": self.environment / "node"}
        named = {f"MMROUTER_{name}": str(value) for name, value in variables.items()}
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        script = HERE / ("node_clients.mjs" if client in NODE else "python_clients.py")
        program = "node" if client in NODE else str(self.environment / "bin" / "python")
        return subprocess.Popen(
            [program, str(script), client],
            env={**inherited, **OFFLINE, **named, "MMROUTER_SCENARIOS": " ".join(scenarios)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, client: str, url: str, key: str, scenarios: Sequence[str], may_fail: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return scenario -> answer, of those that the client has. Fails where one ends with an error, unless it
        ``may_fail``: its answer is the error's text then.
        """
        return answers(self.start(client, url, key, scenarios), may_fail)


def answers(process: "subprocess.Popen[str]", may_fail: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a started client was answered."""
    try:
        output, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert not [line for line in lines if "error" in line and line["scenario"] not in may_fail], lines
    return {line["scenario"]: line["answer"] if "answer" in line else line["error"] for line in lines}
