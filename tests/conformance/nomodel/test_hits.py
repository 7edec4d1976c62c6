"""vLLM's own scheduler and cache manager behind a sidecar and a router, for every layout of cache groups.

Each drawn request is predicted from the events before it and then run: the promise is never above the tokens that the
engine has, and is equal wherever the events tell all. ``MMROUTER_NOMODEL_REQUESTS`` sets the requests per layout,
``MMROUTER_NOMODEL_SEED``, any text, draws others.
"""

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from artefacts import Record
from conformance.conftest import Figure
from conformance.nomodel.layouts import LAYOUTS, VllmProcess, chunk, drafter, sizes_of
from conformance.nomodel.prompts import SHORT, Prompts
from kv_events.mmrouter_consumer import Followed

REQUESTS = int(os.environ.get("MMROUTER_NOMODEL_REQUESTS", "300"))
SEED = os.environ.get("MMROUTER_NOMODEL_SEED", "")
EQUAL = 0.995  # share of promises that are the engine's hit, where the events tell all
BOUNDED = {"windows of 256 alone"}
"""The layout of which the events do not tell all: images that ended before a window."""


@pytest.mark.adopts(engine="vllm", check="hits")
@pytest.mark.parametrize("name", LAYOUTS)
def test_case_45_no_promise_is_above_the_engines_hit_and_nearly_all_are_equal(
    engine: VllmProcess, name: str, tmp_path: Path, record: Record, figure: Figure
) -> None:
    compare(engine, name, tmp_path, record, figure)


@pytest.mark.long_form
@pytest.mark.parametrize("name", LAYOUTS)
def test_case_45_the_same_holds_where_hashes_cover_the_next_tokens(
    newer_engine: VllmProcess, name: str, tmp_path: Path, record: Record, figure: Figure
) -> None:
    assert compare(newer_engine, name, tmp_path, record, figure) == int(bool(drafter(name)))


def compare(engine: VllmProcess, name: str, folder: Path, record: Record, figure: Figure) -> int:
    """Drive an engine and a router by drawn requests; return the tokens after a block that its hash covers."""
    drafts = bool(drafter(name))
    groups, lookahead = engine.plan(name)
    followed = Followed(folder, "vllm", engine.release, drafts=drafts, chunk=chunk(name))
    prompts = Prompts(random.Random(name + SEED), block_size=LAYOUTS[name][1], outputs=SHORT)
    seen: Counter[str] = Counter()
    above: list[str] = []
    for _ in range(REQUESTS):
        prompt = prompts.next()
        asked = (prompt.ids, prompt.images, prompt.salt, prompt.lora)
        promised, answer = followed.promised(*asked), engine.run(prompt)
        cached = answer["cached"]
        seen.update(["equal" if promised == cached else "below" if promised < cached else "above"], hit=cached > 0)
        seen.update(promised_tokens=promised, hit_tokens=cached)
        seen["full attention alone above"] += followed.of_primary_alone(*asked) > cached
        if promised > cached:
            above.append(
                f"promised {promised} of {cached} tokens, prompt {len(prompt.ids)}, aborted {bool(prompt.steps)}"
            )
        followed.apply(answer["batches"])
        prompts.answered(prompt, answer["output"])
    counts = {reason: n for reason, n in followed.relay.ledger.counts.items() if reason not in ("stored", "removed")}
    ahead = f", lookahead {lookahead}" * bool(lookahead)
    record(f"vLLM without a model, {name}{ahead}, {len(groups)} groups", {**seen, **counts})
    for what, count in {"groups": len(groups), "lookahead": lookahead, "requests": REQUESTS}.items():
        figure(what, count)
    for what in ("equal", "below", "above"):
        figure(what, seen[what])
    assert not above
    assert followed.worker.layout.lookahead == lookahead
    drops = drafts and not lookahead
    assert seen["hit"] > REQUESTS / 8
    assert followed.relay.ledger.counts["removed"], "nothing was evicted"
    assert bool(followed.worker.layout.bounds) == (drops and name.startswith("windows"))
    if "beside" in name or drops:
        assert seen["full attention alone above"] > REQUESTS / 40
    if name not in BOUNDED:
        assert seen["equal"] >= EQUAL * REQUESTS
        # Where full attention has the larger blocks, the end of a prompt is a part of one, which is put aside.
        assert set(counts) <= ({"block_size"} if max(sizes_of(name)) > LAYOUTS[name][1] else set())
    return lookahead
