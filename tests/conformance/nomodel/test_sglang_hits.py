"""SGLang's own radix tree and page allocator behind a sidecar and a router, for pages of several sizes.

Each drawn request is predicted from the events before it and then run: the promise is the engine's hit.
``MMROUTER_NOMODEL_REQUESTS`` sets the requests per size, ``MMROUTER_NOMODEL_SEED`` draws others.
"""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from artefacts import Record
from conformance.conftest import Figure
from conformance.nomodel.layouts import HYBRIDS, PAGES, SglangHybridProcess, SglangProcess
from conformance.nomodel.prompts import Prompts
from conformance.nomodel.record import with_sentinels
from conformance.nomodel.test_hits import REQUESTS, SEED
from kv_events.mmrouter_consumer import Followed

from mmrouter_lib.engines.sglang.adapter import names_adapters
from mmrouter_lib.engines.sglang.identity import legacy_sentinels


def drawn(engine: SglangProcess | SglangHybridProcess, name: str, page: int, folder: Path) -> tuple[Followed, Prompts]:
    """Give an engine its pages; return what follows its events, and the prompts of its requests."""
    engine.plan(name)
    followed = Followed(folder, "sglang", engine.release, drafts=False)
    return followed, Prompts(random.Random(name + SEED), block_size=page)


@pytest.mark.adopts(engine="sglang", check="hits")
@pytest.mark.parametrize("name", PAGES)
def test_every_promise_is_the_engines_hit(
    sglang_engine: SglangProcess, name: str, tmp_path: Path, record: Record, figure: Figure
) -> None:
    release = sglang_engine.release
    followed, prompts = drawn(sglang_engine, name, PAGES[name][0], tmp_path)
    seen: Counter[str] = Counter()
    different, legacy = [], legacy_sentinels(release)
    for _ in range(REQUESTS):
        prompt = prompts.next()
        if not names_adapters(release):  # then a router serves none
            prompt = replace(prompt, lora=None)
        ids = with_sentinels(prompt, legacy=legacy)
        promised = followed.promised(ids, (), prompt.salt, prompt.lora)
        answer = sglang_engine.run(prompt, bytes.hex)
        assert answer["ids"] == ids, "the engine's sentinels are others"
        seen.update(requests=1, hit=answer["cached"] > 0, hit_tokens=answer["cached"], image=bool(prompt.images))
        if promised != answer["cached"]:
            different.append(
                f"promised {promised} of {answer['cached']} tokens, adapter {prompt.lora}, salt {prompt.salt}"
            )
        followed.apply(answer["batches"])
        prompts.answered(prompt, answer["output"])
    record(f"SGLang without a model, full attention, {name}", {**seen, "different": len(different)})
    figure("equal", REQUESTS - len(different))
    figure("different", len(different))
    assert not different
    assert seen["hit"] > REQUESTS / 8
    assert followed.relay.ledger.counts["removed"], "nothing was evicted"


@pytest.mark.adopts(engine="sglang", check="hits beside states and windows")
@pytest.mark.parametrize("name", HYBRIDS)
def test_hits_beside_states_and_windows_are_at_most_the_blocks_held(
    sglang_hybrid_engine: SglangHybridProcess, name: str, tmp_path: Path, record: Record, figure: Figure
) -> None:
    followed, prompts = drawn(sglang_hybrid_engine, name, HYBRIDS[name][0], tmp_path)
    seen: Counter[str] = Counter()
    outside, legacy = [], legacy_sentinels(sglang_hybrid_engine.release)
    for _ in range(REQUESTS):
        prompt = prompts.next()
        ids = with_sentinels(prompt, legacy=legacy)
        least, most = followed.bounds(ids, prompt.salt, prompt.lora)
        answer = sglang_hybrid_engine.run(prompt, bytes.hex)
        cached = answer["cached"]
        assert answer["ids"] == ids, "the engine's sentinels are others"
        seen.update(["equal" if least == cached else "below" if least < cached else "above"])
        seen["as held"] += cached == most
        seen.update(hit_tokens=cached, held_tokens=most)
        if not least <= cached <= most:
            outside.append(f"promised {least}, held {most}, hit {cached} tokens")
        followed.apply(answer["batches"])
        prompts.answered(prompt, answer["output"])
    record(f"SGLang without a model, {name}", seen)
    for what in ("equal", "below", "above", "as held"):
        figure(what, seen[what])
    assert not outside
    assert seen["below"] > REQUESTS / 30, "nothing was hit"
    assert followed.relay.ledger.counts["removed"], "nothing was evicted"
    assert seen["as held"] < REQUESTS, "nothing was hidden"
