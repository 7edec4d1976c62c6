"""``make demo ENGINE=...``, as the README has it: two real engines start side by side and are routed to exactly."""

import json
import signal
import subprocess

import pytest
from local.rig import ROOT
from long_form import parameters

SECONDS = 900


@pytest.mark.parametrize("engine", parameters(["vllm", "sglang"], "vllm"))
def test_the_demo_with_real_engines_starts_them_side_by_side_and_ends_with_exact_hits(
    engine: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(f"{engine}_env")  # built with a limit of its own
    command = ["make", "--no-print-directory", "demo", f"ENGINE={engine}", "ARGS=--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
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
    lines = [tuple(part.strip() for part in line.split("|", 1)) for line in log.splitlines() if "|" in line]
    sources = [source for source, _ in lines]
    ready = min(lines.index((f"demo-worker-{number}", "Ready")) for number in range(2))
    assert all(sources.index(f"demo-worker-{number}/engine") < ready for number in range(2))
