"""Memory of a router's process while it answers hostile bodies: bounded by their bytes, and given back afterwards."""

import http.client
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from unit.router.rig import PORT
from unit.router.test_hostile_bodies import BODIES, chat
from waiting import wait_for

from mmrouter_router.request.prepared import CHAT

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
FACTOR = 12  # bytes of memory for each byte of a body, at the most
FLOOR = 64 * MIB  # of a small body: stacks and arenas of threads, and what is tokenized at a time
KEPT = 16 * MIB  # what may stay of a body: its decision, its token ids in the caches

PROGRAM = """
import sys
from campaign.allocated import allocated
from campaign.targets.loop_turns import LoopTurns
with LoopTurns() as target:
    print(target.ip, flush=True)
    for _ in sys.stdin:
        print(allocated(), flush=True)
"""


def escapes(size: int) -> dict[str, Any]:
    plain = "A" * (size - 3_000_000)
    return chat([{"type": "image_url", "image_url": {"url": "data:," + "%41" * 1_000_000 + plain}}])


DEEP = orjson.Fragment(b"[" * 90 + b"]" * 90)
PARTS, MESSAGE = [{"type": "text", "text": "x"}], [{"role": "user", "content": "x"}]
SHAPES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "text of 8 MiB": (CHAT, lambda: chat("hello " * (8 * MIB // 6))),
    "text that is predicted": (CHAT, lambda: chat("hello " * 660_000)),
    "text without spaces": (CHAT, lambda: chat("x" * 4_000_000)),
    "digits that are predicted": (CHAT, lambda: chat("7 " * 1_000_000)),
    "signs that NFC writes as three": (CHAT, lambda: chat("\U0001d160" * 32_000)),
    "digits in long words": (CHAT, lambda: chat(f"{'7' * 65_000} " * 60)),
    "digits in short turns": (CHAT, lambda: {"model": "t", "messages": chat("7 " * 500)["messages"] * 1000}),
    "a URI of 57 MB with percent escapes": (CHAT, lambda: escapes(57_000_000)),
    "percent escapes alone": (CHAT, lambda: escapes(3_000_000)),
    "300,000 parts": (CHAT, lambda: chat(PARTS * 300_000)),
    "40,000 parts": (CHAT, lambda: chat(PARTS * 40_000)),
    "300,000 messages": (CHAT, lambda: {"model": "t", "messages": MESSAGE * 300_000}),
    "30,000 messages": (CHAT, lambda: {"model": "t", "messages": MESSAGE * 30_000}),
    "deep arrays": (CHAT, lambda: chat("x", chat_template_kwargs={"x": [DEEP] * 1400})),
    "a million numbers": (CHAT, lambda: chat("x", stop_token_ids=[1] * 1_000_000)),
    "a million token ids": ("/v1/completions", lambda: {"model": "t", "prompt": [100] * 1_000_000}),
    "an image of 48 MB": (CHAT, lambda: BODIES["image of segments"][1](48_000_000)),
}


class Serving:
    """A router in a process of its own, which answers each line with its allocated bytes."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self._ip = self._line()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def allocated(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._line())

    def resident(self, name: str = "VmRSS") -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:"))

    def peak_of(self, path: str, raw: bytes) -> tuple[int, int]:
        """Answer a body; return the status and by how much the resident memory grew at the most."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")  # begins the peak again
        before = self.resident()
        client = http.client.HTTPConnection(self._ip, PORT, timeout=600)
        client.request("POST", path, raw)
        status = client.getresponse().status
        client.close()
        return status, self.resident("VmHWM") - before


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    made = Serving()
    yield made
    made.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_bounded_by_the_bytes_of_a_body_and_given_back(serving: Serving, shape: str) -> None:
    path, body = SHAPES[shape]
    raw = orjson.dumps(body())
    before = serving.allocated()
    status, peak = serving.peak_of(path, raw)
    assert status in (200, 400), "no answer of an overloaded router"
    assert peak <= FACTOR * len(raw) + FLOOR
    wait_for(lambda: serving.allocated() - before <= KEPT, 30, "the memory is given back")
