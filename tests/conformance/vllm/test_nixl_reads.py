"""NIXL reads that fail, with the real library over tcp: nothing is drained, and nothing wrong is ever read."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from mmrouter_handover.plugin.install import install

SCRIPT = Path(__file__).with_name("nixl_reads.py")
ROUNDS = 20


def test_case_64_failed_reads_drain_no_pool_whatever_the_renderer_does(vllm_env: Path, tmp_path: Path):
    """The pool holds eight of these items: twenty buffers that are not given back would be seen."""
    if not list(vllm_env.glob("lib/python3*/site-packages/nixl")):
        pytest.skip("not run: the engine's environment has no NIXL")
    install(tmp_path / "plugin")
    done = subprocess.run(
        [str(vllm_env / "bin" / "python"), str(SCRIPT), str(tmp_path / "plugin"), str(ROUNDS)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "UCX_TLS": "tcp,self"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = json.loads(done.stdout)
    came = {name: set(step["came"]) for name, step in steps.items() if isinstance(step, dict)}
    assert came == {
        "well": {"ok"},
        "released": {"stale"},
        "no such memory": {"failed"},
        "another item": {"corrupt"},
        "well after these": {"ok"},
        "standing still": {"failed"},
        "going on": {"ok"},
        "standing still again": {"failed"},
        "killed": {"failed"},
    }
    assert [step["wrong"] for step in steps.values() if isinstance(step, dict)] == [0] * len(came)
    assert (steps["settled after it went on"], steps["settled after its end"]) == (True, True)
    files = [step["files"] for step in steps.values() if isinstance(step, dict)]
    assert max(files) <= files[0] + 5, files
    for name, step in steps.items():
        if isinstance(step, dict):
            # A renderer that stands still has one buffer, and gets no other until it has let go of it.
            assert step["stuck"] == name.startswith("standing still"), name
            assert bool(step["lent"]) == bool(step["stuck"]), name
