"""From recorded events to a router's overlap: Phi-3 with its sliding window is predicted exactly."""

from typing import Any

import pytest

from mmrouter_lib.block_keys import block_keys, namespace_seed
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_lib.feed import CacheGroup, deciding
from mmrouter_router.fleet.index import Index, window_blocks
from mmrouter_sidecar.blocks.ledger import Ledger

pytestmark = pytest.mark.usefixtures("form")

KEY = bytes(range(32))
SIZE = 32


def seed(lora: str | None = None, salt: str | None = None) -> int:
    return namespace_seed(KEY, model="m", lora=lora, salt=salt)


class Routed:
    """A ledger that reads a capture's frames, and an index that follows it."""

    def __init__(self) -> None:
        self.ledger, self.index = Ledger(seed), Index()
        self.slot = self.index.join()

    def apply(self, payload: bytes) -> set[int]:
        """Take a batch; return the keys that became held."""
        self.ledger.apply(decode_batch(payload), 0)
        new: set[int] = set()
        for change in self.ledger.take().changes:
            self.index.remove(self.slot, change.removed)
            self.index.store(self.slot, change.stored)
            new |= set(change.stored)
        return new

    def overlap(self, keys: Any) -> int:
        group = deciding(self.ledger.groups)
        if not group.window:
            return self.index.match(keys, [self.slot])[self.slot]
        return self.index.match_windows(keys, {self.slot: window_blocks(group.window, SIZE)})[self.slot]


@pytest.mark.parametrize(
    "name",
    [
        "llava15-real.jsonl",
        "llavanext-real.jsonl",
        "phi3v-nosw.jsonl",
        "phi3v-real_sw131072_edge.jsonl",
        "phi3v-real_sw131072_probes.jsonl",
        "qwen2vl-real.jsonl",
        "qwen3vl-real.jsonl",
    ],
)
def test_case_50_predicted_keys_and_predicted_hits_are_the_engines_step_by_step(captures: Any, name: str) -> None:
    routed, compared = Routed(), 0
    for step in captures.steps(name):
        predicted = block_keys(step.ids, SIZE, step.spans, seed(step.lora, step.salt))
        overlap = routed.overlap(predicted[: (step.prompt - 1) // SIZE])
        # The probes begin in the middle of an engine's life; an image that it held from before is unknown to us.
        if not (name.endswith("probes.jsonl") and step.label == "report mode full, image"):
            assert overlap * SIZE == step.cached, step.label
        for payload in step.payloads:
            assert routed.apply(payload) <= set(predicted), step.label
        compared += 1
    assert compared >= 4
    assert not routed.ledger.counts["ragged_store"]
    assert not routed.ledger.counts["unknown_parent"]
    assert routed.ledger.aside == 0
    window, kind = (131072, "sliding_window") if "sw131072" in name else (0, "full_attention")
    assert routed.ledger.groups == (CacheGroup(0, kind, window),)
