"""Target ``tenant_timing``: can a tenant tell from the time to its first token what another tenant sent before?

An input is a number, from which two prompts with an image are drawn. The first tenant sends one of them. Then the
second tenant sends both, in random order, and the pair is counted by which of the two was answered faster. If it does
not matter what another tenant sent, each is faster in half of the pairs. The deployment is ``mmrouter up`` with one
simulated engine that takes no time for a token, so the times are those of the router.
"""

import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from math import sqrt
from pathlib import Path
from typing import Any, Self

import httpx
from campaign.target import BrokenPropertyError, Target
from local.rig import deployed, example
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

KEYS = {"first": "key-of-first", "second": "key-of-second"}
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": KEYS}
WORDS = ["harbour", "lamp", "letter", "captain", "bridge", "painter", "rain", "noon", "tide", "story", "quay", "bell"]
PROMPT_WORDS = 150
SIGMAS = 5.0  # by which the share of pairs may differ from a half


class TenantTiming(Target):
    name = "tenant_timing"
    short = 0
    in_process = False
    limit_s = 600.0

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        resource = example()
        resource["spec"]["frontend"].update(replicas=1, apiKeys={"secret": {"name": "keys"}})
        pool = resource["spec"]["pools"][0]
        pool["replicas"], pool["args"] = 1, ["--sim-decode-ms=0", "--sim-jitter=0"]
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        deployment = self._stack.enter_context(deployed(folder, SECRET, resource))
        wait_for(deployment.settled, 60, "the engine is verified")
        self._client = self._stack.enter_context(httpx.Client(base_url=deployment.url, timeout=300))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        return str(source.randrange(1 << 60)).encode()

    def check(self, data: bytes) -> str:
        source = random.Random(data)
        sent, unsent = _body(source), _body(source)
        self._seconds("first", sent)
        pair = [sent, unsent]
        source.shuffle(pair)
        seconds = {id(body): self._seconds("second", body) for body in pair}
        self.totals["pairs"] += 1
        self.totals["pairs in which the sent prompt was faster"] += seconds[id(sent)] < seconds[id(unsent)]
        pairs, faster = self.totals["pairs"], self.totals["pairs in which the sent prompt was faster"]
        if abs(faster - pairs / 2) > SIGMAS * sqrt(pairs) / 2:
            raise BrokenPropertyError(f"of {pairs} pairs, the prompt that another tenant sent was faster in {faster}")
        return "pair"

    def _seconds(self, tenant: str, body: dict[str, Any]) -> float:
        headers = {"authorization": f"Bearer {KEYS[tenant]}"}
        began = time.perf_counter()
        with self._client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            pieces = answer.iter_bytes()
            next(pieces)
            seconds = time.perf_counter() - began
            list(pieces)
        return seconds


def _body(source: random.Random) -> dict[str, Any]:
    text = " ".join(source.choices(WORDS, k=PROMPT_WORDS))
    image = {"type": "image_url", "image_url": {"url": data_uri(picture(str(source.random()), 112, 112))}}
    messages = [{"role": "user", "content": [{"type": "text", "text": text}, image]}]
    return {"model": "demo", "stream": True, "max_tokens": 1, "messages": messages}
