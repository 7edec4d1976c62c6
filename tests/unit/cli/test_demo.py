"""The demo's figures and what it calls a failure."""

import io

import pytest
from rich.console import Console

from mmrouter_cli.demo import Step, StepRow, hit_ratio, repeat_failure, show, workload


def row(**values):
    base = {"name": "x", "worker": "a", "blocks": 6, "overlap": 6, "prompt_tokens": 100, "cached_tokens": 96}
    return StepRow(**{**base, "exactness": "exact", "why": "", "milliseconds": 1.0, **values})


def test_the_hit_ratio_is_a_ratio_of_sums_and_absent_counts_as_none():
    assert hit_ratio([row(), row(prompt_tokens=300, cached_tokens=-1)]) == 96 / 400
    assert hit_ratio([]) == 0


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_is_whole_on_any_terminal_and_names_arepeat_failure(width):
    file = io.StringIO()
    rows = [row(worker="demo-worker-0", why="cost 0 against 36", failure="expected a hit"), row(worker="demo-worker-1")]
    show(Console(file=file, width=width), rows, rows)
    out = file.getvalue()
    assert all(len(line) <= width for line in out.splitlines())
    assert all(said in out for said in ("demo-worker-0", "demo-worker-1", "expected a hit", "96.0%"))
    assert ("cost 0 against 36" in out) == (width == 140)


def test_a_repeat_must_be_an_exact_whole_hit_that_the_engine_confirms():
    repeat, trace = Step("x", (), repeats="y"), {"block_size": 16, "reasons": ["why"]}
    assert repeat_failure(repeat, row(), trace) == ""
    assert "affinity" in repeat_failure(repeat, row(exactness="affinity"), trace)
    assert "5 of 6" in repeat_failure(repeat, row(overlap=5), trace)
    assert "says 80" in repeat_failure(repeat, row(cached_tokens=80), trace)
    assert "says -1" in repeat_failure(repeat, row(cached_tokens=-1), trace)
    assert repeat_failure(Step("x", ()), row(overlap=0), trace) == ""


def test_every_repeat_names_a_step_of_the_same_prompt_before_it():
    steps = workload("nonce", "http://127.0.0.1:1")
    seen = {}
    for step in steps:
        if step.repeats:
            assert len(seen[step.repeats].messages) == len(step.messages)
        seen[step.name] = step
    assert sum(bool(step.repeats) for step in steps) >= 5
