"""`mmrouter gateway` as a process."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from local.rig import ROOT
from waiting import answers_ok, wait_for

ALIASES, SMALL = (ROOT / "examples" / "gateway" / name for name in ("aliases.yaml", "small.yaml"))
START_SECONDS = 600
CHAT = "/v1/chat/completions"


@dataclass
class Gateway:
    """A running ``mmrouter gateway``."""

    process: subprocess.Popen[str]
    url: str
    log: list[str]

    @property
    def host(self) -> str:
        return str(httpx.URL(self.url).host)

    @property
    def ready(self) -> bool:
        return answers_ok(f"http://{self.host}:9090/readyz")

    def client(self, key: str = "any", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300, **options)

    def ask(self, model: str, *texts: str, key: str = "any", **fields: Any) -> httpx.Response:
        """Send a chat whose turns are these texts, of user and assistant in turn."""
        turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        body = {"model": model, "max_tokens": 1, "messages": turns, **fields}
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(self.url + CHAT, json=body, headers=headers, timeout=300)

    def names(self) -> list[str]:
        return [model["id"] for model in httpx.get(f"{self.url}/v1/models", timeout=10).json()["data"]]


@contextmanager
def gateway_process(*options: str) -> Iterator[Gateway]:
    """``mmrouter gateway`` in the background until the block ends; leaves by SIGINT."""
    command = [sys.executable, "-m", "mmrouter_cli", "gateway", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True
    )
    log: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda out: log.extend(iter(out.readline, "")), args=(process.stdout,))
    reader.start()
    try:
        found: list[str] = []
        wait_for(
            lambda: process.poll() is not None or found.extend(re.findall(r"ready (\S+)/v1", "".join(log))) or found,
            START_SECONDS,
            "the gateway is ready",
        )
        assert found, "".join(log)
        yield Gateway(process, found[0], log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)
        reader.join(5)
