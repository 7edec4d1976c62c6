"""vLLM's own offloading connector behind a sidecar and a router: promises of the device and of the CPU tier.

The engine's scheduler, cache manager and connector decide what is stored, evicted and loaded; only copies are missing.
"""

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.nomodel.layouts import LAYOUTS, VllmProcess
from conformance.nomodel.prompts import Drawn, Prompts
from kv_events.mmrouter_consumer import Followed

REQUESTS = int(os.environ.get("MMROUTER_NOMODEL_REQUESTS", "300"))
EQUAL = 0.995  # share of promises that are what the engine has on its device and in its tier
BLOCKS, TIER_BLOCKS = 160, 500  # so few that both evict
TIERED = {
    "placeholder events": ("full attention", False),
    "self-describing events": ("full attention", True),
    "MLA": ("MLA", False),
}
"""Layout, and whether events of the tier describe themselves."""


@pytest.mark.parametrize("name", TIERED)
def test_no_promise_of_the_device_and_the_cpu_tier_is_above_what_the_engine_loads(
    engine: VllmProcess, name: str, tmp_path: Path, record: Record
) -> None:
    compare(engine, name, tmp_path, record)


@pytest.mark.long_form
@pytest.mark.parametrize("name", TIERED)
def test_no_promise_of_the_tiers_is_above_in_the_newer_release(
    newer_engine: VllmProcess, name: str, tmp_path: Path, record: Record
) -> None:
    compare(newer_engine, name, tmp_path, record)


def compare(engine: VllmProcess, name: str, folder: Path, record: Record) -> None:
    """Drive an engine with a CPU tier, of which both caches are so small that they evict, and a router."""
    layout, described = TIERED[name]
    engine.plan(layout, BLOCKS, {"blocks": TIER_BLOCKS, "described": described})
    followed = Followed(folder, "vllm", engine.release, drafts=False)
    size = LAYOUTS[layout][1]
    prompts = Prompts(random.Random(name), size)
    seen: Counter[str] = Counter()
    above: list[tuple[Drawn, tuple[int, int], Any]] = []
    for _ in range(REQUESTS):
        prompt = prompts.next()
        promised = followed.promised_with_tiers(prompt.ids, prompt.images, prompt.salt, prompt.lora)
        answer = engine.run(prompt)
        tokens, cached = len(prompt.ids), answer["cached"]
        if 0 <= cached < sum(promised):
            above.append((prompt, promised, answer))
        if answer["reported"] < 0:
            seen["aborted before its answer"] += 1
        else:
            real = answer["own"], min(cached, (tokens - 1) // size * size) - answer["own"]
            seen.update(["equal" if promised == real else "different"], in_tier=real[1] > 0, hit=cached > 0)
            seen.update(promised_tokens=sum(promised), tier_tokens=promised[1], hit_tokens=sum(real))
            # The answer counts a whole prompt that was loaded, although its last token is computed anew.
            assert answer["reported"] in {cached, tokens if cached == tokens - 1 else cached}
        followed.apply(answer["batches"])
        prompts.answered(prompt, answer["output"])
    counts = {reason: n for reason, n in followed.relay.ledger.counts.items() if reason not in ("stored", "removed")}
    record(f"vLLM without a model, CPU tier, {name}", {**seen, **counts})
    assert not above
    assert seen["in_tier"] > REQUESTS / 10
    assert seen["equal"] >= EQUAL * (REQUESTS - seen["aborted before its answer"])
    assert not counts
