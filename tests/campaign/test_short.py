"""The short form of the campaign: its corpus and a fixed number of drawn inputs of every target."""

import pytest
from campaign import corpus
from campaign.target import run
from campaign.targets import TARGETS

SEED = "gate"


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.short])
def test_no_input_of_a_target_breaks_a_property(name: str) -> None:
    target = TARGETS[name]()
    known = corpus.load().get(name, {}).values()
    first = len(known) + len(target.seeds())
    counts = run(target, SEED, list(known), lambda counts: counts.inputs < first + target.short)
    assert not counts.failures, "\n\n".join(f"{f.kind}: {f.message}\n{f.data!r}" for f in counts.failures)
    assert counts.inputs == first + target.short
    assert len(counts.outcomes) > 1
