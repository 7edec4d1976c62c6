"""The short form of the campaign: its corpus and a fixed number of drawn inputs of every target."""

import json
import os
import random
import subprocess
import sys

import pytest
from campaign import corpus
from campaign.target import BrokenPropertyError, run
from campaign.targets import TARGETS
from campaign.targets.resources import Resources, judged
from campaign.worker import ROOT
from cluster.crd_cases import good

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


@pytest.mark.long_form
@pytest.mark.parametrize("name", [name for name in TARGETS if name.endswith("faults")])
def test_the_first_fault_of_a_target_breaks_no_promise(name: str) -> None:
    """In a process of its own, as a target isolates its process. Each takes up to a minute of CPU time."""
    if reason := TARGETS[name].missing():
        pytest.skip(f"not run: {reason}")
    command = [sys.executable, "-m", "campaign", name, f"--seed={SEED}", "--count=1"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("spec", ["text", True, None, 5, [], {}, [1]])
def test_a_resource_is_drawn_from_one_with_any_spec(spec: object) -> None:
    kept = [json.dumps({"spec": spec}).encode()]
    for seed in range(50):
        json.loads(Resources().draw(random.Random(seed), kept))


def test_an_admitted_resource_is_judged_by_what_the_server_stored() -> None:
    stored = good()["minimal"]
    assert judged(201, stored) == "201"
    stored["spec"]["engine"]["args"] = ["--block"]  # a shortened flag, which no CEL rule recognizes
    assert judged(201, stored) == "201 beyond CEL"
    stored["spec"]["pools"][0]["replicas"] = -1
    with pytest.raises(BrokenPropertyError, match="admitted, but not read"):
        judged(201, stored)
