"""A real engine that computes on a CPU: its pool asks for an accelerator that this machine does not have."""

import json
from pathlib import Path

import pytest
from conformance.conftest import Shrunk
from conformance.engine_process import require_memory
from conformance.engines import deployed, sglang_manifest
from waiting import wait_for

REPOSITORY = "Qwen/Qwen2.5-VL-7B-Instruct"
SECONDS = 300.0

pytestmark = pytest.mark.long_form


def test_an_engine_that_fell_back_to_the_cpu_is_named(
    sglang_env: Path, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory
) -> None:
    require_memory()
    made = sglang_manifest(shrunk(REPOSITORY), REPOSITORY, [("worker", 1)])
    # As an image for CPUs sets it: without the variable SGLang refuses to start where it finds no accelerator.
    on_cpu = {"name": "engine", "env": [{"name": "SGLANG_USE_CPU_ENGINE", "value": "1"}]}
    of_nvidia = {"accelerator": {"kind": "nvidia"}, "podTemplate": {"spec": {"containers": [on_cpu]}}}
    made["spec"]["pools"][0].update(of_nvidia)
    with deployed(sglang_env, tmp_path_factory.mktemp("devices"), made) as deployment:
        wait_for(deployment.settled, SECONDS, "the engine is verified")
        [worker] = deployment.state()["workers"]
        assert (worker["device"], worker["requested_device"]) == ("cpu", "cuda")
        done = deployment.mmrouter("doctor", "--url", deployment.url, "--json")
        findings = json.loads(done.stdout)["subjects"][0]["findings"]
        seen = [each["seen"] for each in findings if (each["check"], each["level"]) == ("devices", "problem")]
        assert (done.returncode, seen) == (1, [f"{worker['name']} computes on cpu, and its pool asks for cuda"])
