"""``mmrouter up --engines path`` on a machine with devices: what a stand-in for an engine finds in its environment."""

import json
import sys
from pathlib import Path

import pytest
from local.rig import deployed, example

ENGINE = """#!{python}
# The simulated engine, with a note of what it was started with.
import json, os, sys
from mmrouter_sim.__main__ import main

flag = "--gpu-memory-utilization"
share = sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else ""
with open({notes!r}, "a") as file:
    given = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("ZE_AFFINITY_MASK"), share
    file.write(json.dumps([os.environ["POD_NAME"], *given]) + "\\n")
sys.exit(main(["vllm", *sys.argv[1:]]))
"""


def test_each_engine_sees_its_own_devices_and_those_of_one_device_split_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "started.jsonl"
    (tmp_path / "bin").mkdir()
    engine = tmp_path / "bin" / "vllm"
    engine.write_text(ENGINE.format(python=sys.executable, notes=str(notes)))
    engine.chmod(0o755)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0")
    resource = example()
    resource["spec"]["frontend"]["replicas"] = 1
    resource["spec"]["pools"] = [
        {"name": "gpu", "role": "worker", "replicas": 3, "accelerator": {"kind": "nvidia"}},
        {"name": "xe", "role": "worker", "accelerator": {"kind": "intel-xe"}},
    ]
    with deployed(tmp_path, resource, options=("--engines", "path", "--engine-env", str(tmp_path))) as deployment:
        deployment.assert_gate_passes()
    # The variable that an engine's kind does not use is this machine's own.
    assert sorted(map(json.loads, notes.read_text().splitlines())) == [
        ["demo-gpu-0", "4", "0", "0.45"],
        ["demo-gpu-1", "7", "0", ""],
        ["demo-gpu-2", "4", "0", "0.45"],
        ["demo-xe-0", "4,7", "0", ""],
    ]
