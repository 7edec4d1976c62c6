"""What of a campaign's figures is a failure: growth of the product, not of a target's own process or its warm-up."""

import pytest
from campaign.report import problems
from campaign.target import FLAT_BYTES, MIN_SAMPLES, Counts
from campaign.targets import TARGETS


def grown(samples: int) -> Counts:
    """Return the counts of a run whose process grows with every input."""
    return Counts(inputs=samples, memory=[(number, 2 * number * FLAT_BYTES) for number in range(1, samples + 1)])


@pytest.mark.parametrize("name", TARGETS)
def test_growth_of_a_process_that_holds_the_product_is_a_failure(name: str) -> None:
    assert bool(problems({name: grown(MIN_SAMPLES)})) is TARGETS[name].in_process


def test_growth_over_a_few_inputs_is_none() -> None:
    assert problems({"urls": grown(MIN_SAMPLES - 1)}) == []
    assert problems({"urls": Counts()}) == ["urls: no input was checked"]


@pytest.mark.parametrize("name", ["faults", "soak", "tenant_timing"])
def test_a_target_of_other_processes_is_not_judged_by_its_own_memory(name: str) -> None:
    assert not TARGETS[name].in_process


def test_memory_of_single_inputs_is_no_growth() -> None:
    memory = [(number, (8 if number % 3 else 0) * FLAT_BYTES) for number in range(3 * MIN_SAMPLES)]
    assert problems({"loop_turns": Counts(inputs=len(memory), memory=memory)}) == []
