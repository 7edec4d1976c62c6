"""``make demo`` with real engines, as the README has it: two start side by side and are routed to exactly."""

import json
import os
import signal
import subprocess

import pytest
from conformance.engine_process import FORKED, KEPT
from local.rig import ROOT
from long_form import parameters

SECONDS = 900
DEMOS = {"ENGINE=vllm": "vllm_env", "ENGINE=sglang": "sglang_env", "MODEL=qwen3.5": "vllm_env"}
HYBRID_BLOCK = 32


@pytest.mark.parametrize("demo", parameters(DEMOS, "ENGINE=vllm"))
def test_the_demo_with_real_engines_starts_them_side_by_side_and_ends_with_exact_hits(
    demo: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(DEMOS[demo])  # built with a limit of its own
    command = ["make", "--no-print-directory", "demo", demo, "ARGS=--json --verbose"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | KEPT | FORKED,  # vLLM is imported by one process of each engine, instead of three
        start_new_session=True,
    )
    try:
        output, log = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # `up` runs in make's place and stops its engines
            process.wait(60)
    assert output, log[-3000:]
    result = json.loads(output.splitlines()[-1])
    assert (process.returncode, result["passed"]) == (0, True), (result["rows"], log[-3000:])
    assert [row["failure"] for row in result["rows"]] == [""] * len(result["rows"])
    assert result["hit_ratio"] > result["round_robin"]["hit_ratio"]
    if demo.startswith("MODEL="):
        for row in result["rows"]:  # also the misses of a hybrid are those that were predicted
            reachable = (row["prompt_tokens"] - 1) // HYBRID_BLOCK
            assert row["cached_tokens"] == min(row["overlap"], reachable) * HYBRID_BLOCK, row
    lines = [tuple(part.strip() for part in line.split("|", 1)) for line in log.splitlines() if "|" in line]
    sources = [source for source, _ in lines]
    ready = min(lines.index((f"demo-worker-{number}", "Ready")) for number in range(2))
    assert all(sources.index(f"demo-worker-{number}/engine") < ready for number in range(2))
