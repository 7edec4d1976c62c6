"""The settings of a sidecar, and the process that reads them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unit.engines.conftest import deployment, role

from mmrouter_lib import model_folder as metadata
from mmrouter_lib.api import to_json as to_json_object
from mmrouter_lib.block_keys import namespace_seed
from mmrouter_sidecar.settings import Settings, SettingsError, from_json, to_json
from mmrouter_sidecar.settings_loader import load


@pytest.fixture
def environment(tmp_path: Path, settings: Settings) -> dict[str, str]:
    """Files and variables as a rendered pod has them."""
    secrets = tmp_path / "config" / "secrets"
    secrets.mkdir(parents=True)
    worker = role("worker", accelerator={"kind": "nvidia", "count": 2}, parallelism={"data": 2})
    model = {"id": "org/model", "revision": "v1"}
    resource = deployment(worker, engine="vllm", model=model, sidecar={"bufferEvents": 500})
    (tmp_path / "config" / "deployment.json").write_text(json.dumps(to_json_object(resource)))
    (secrets / "identity.key").write_bytes(bytes(range(32)))
    (secrets / "engine.key").write_text("engine-secret\n")
    curve, names = settings.curve, ("sidecar.curve.public", "sidecar.curve.secret", "router.curve.public")
    for name, key in zip(names, (curve.public, curve.secret, curve.client), strict=True):
        (secrets / name).write_bytes(key + b"\n")
    return {
        "MMROUTER_CONFIG": str(tmp_path / "config"),
        "MMROUTER_STATE_DIR": str(tmp_path / "state"),
        "MMROUTER_MODEL_DIR": str(tmp_path / "model"),
        "MMROUTER_POOL": "worker",
        "POD_UID": "pod-7",
        "POD_IP": settings.pod_ip,
        "POD_LOOPBACK": settings.loopback,
    }


@pytest.mark.parametrize(
    ("engine", "kind", "path", "seconds", "publishes"),
    [
        ("vllm", "worker", "/health", 5.0, True),
        ("vllm", "encoder", "/health", 5.0, False),
        ("sglang", "worker", "/ready", 5.0, True),
        ("sglang", "decode", "/ready", 5.0, False),
        ("sglang", "encoder", "/health", 30.0, False),
    ],
)
def test_the_health_check_depends_on_the_role(
    environment: dict[str, str], engine: str, kind: str, path: str, seconds: float, publishes: bool
) -> None:
    file = Path(environment["MMROUTER_CONFIG"]) / "deployment.json"
    resource = json.loads(file.read_text())
    asked = {"name": "asked", "role": kind, "accelerator": {"kind": "nvidia"}}
    others = [asked | {"name": "prefill", "role": "prefill"}] if kind == "decode" else resource["spec"]["pools"]
    resource["spec"] |= {"engine": {"type": engine}, "pools": [*others, asked]}
    file.write_text(json.dumps(resource))
    settings = load(environment | {"MMROUTER_POOL": "asked"})
    assert (settings.health_path, settings.health_seconds, settings.publishes) == (path, seconds, publishes)


def test_files_and_variables_become_settings(environment: dict[str, str], settings: Settings) -> None:
    loaded = load(environment)
    assert (loaded.pod_uid, loaded.engine, loaded.model, loaded.revision) == ("pod-7", "vllm", "org/model", "v1")
    assert (loaded.ranks, loaded.buffer_events, loaded.engine_key) == (2, 500, "engine-secret")
    assert loaded.curve == settings.curve
    key = bytes(range(32))
    assert loaded.seed("l", "s") == namespace_seed(key, model="org/model", revision="v1", lora="l", salt="s")
    assert loaded.fingerprint != settings.fingerprint


def test_the_shared_directory_and_its_limit_are_optional(environment: dict[str, str]) -> None:
    assert (load(environment).shared_dir, load(environment).shared_bytes) == (None, 0)
    environment |= {"MMROUTER_SHARED_DIR": "/var/lib/mmrouter/shared", "MMROUTER_SHARED_LIMIT_BYTES": "8589934592"}
    loaded = load(environment)
    assert (loaded.shared_dir, loaded.shared_bytes) == (Path("/var/lib/mmrouter/shared"), 8 << 30)
    assert from_json(to_json(loaded)) == loaded


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("POD_UID", "", "POD_UID"),
        ("MMROUTER_POOL", "", "MMROUTER_POOL"),
        ("MMROUTER_POOL", "other", "'other'"),
        ("MMROUTER_SHARED_LIMIT_BYTES", "8Gi", "MMROUTER_SHARED_LIMIT_BYTES is '8Gi'"),
    ],
)
def test_a_missing_or_wrong_variable_is_named(
    environment: dict[str, str], variable: str, value: str, named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        load(environment | {variable: value})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("secrets/identity.key", b"short"),
        ("secrets/identity.key", None),
        ("secrets/sidecar.curve.secret", b"not a key"),
        ("secrets/router.curve.public", None),
        ("deployment.json", None),
    ],
)
def test_a_missing_or_malformed_file_is_named(environment: dict[str, str], name: str, content: bytes | None) -> None:
    path = Path(environment["MMROUTER_CONFIG"]) / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(SettingsError, match=name.replace(".", r"\.")):
        load(environment)


def run(environment: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "mmrouter_sidecar"]
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)


def until(process: "subprocess.Popen[str]", words: str) -> str:
    """Read the log until a line holds ``words``."""
    assert process.stderr is not None
    return next(line for line in process.stderr if words in line)


def test_a_killed_process_resumes_and_a_terminated_one_ends_in_order(environment: dict[str, str]) -> None:
    first = run(environment)
    worker = until(first, "ready").split("worker ")[1]
    first.kill()
    first.communicate()
    second = run(environment)
    assert until(second, "ready").split("worker ")[1] == worker, "name and epoch are those of the journal"
    second.send_signal(signal.SIGTERM)
    _, rest = second.communicate(timeout=10)
    assert second.returncode == 0
    assert "stopped at seq 0" in rest


@pytest.mark.parametrize("wrong", ["variable", "resource"])
def test_a_wrong_configuration_exits_with_status_2_and_a_message(environment: dict[str, str], wrong: str) -> None:
    if wrong == "resource":
        (Path(environment["MMROUTER_CONFIG"]) / "deployment.json").write_text('{"spec": {}}')
    process = run(environment | ({"POD_UID": ""} if wrong == "variable" else {}))
    _, log = process.communicate(timeout=20)
    assert process.returncode == 2
    assert f"configuration: {'POD_UID is not set' if wrong == 'variable' else ''}" in log.splitlines()[-1]


def test_the_serving_process_imports_no_models_and_no_terminal_library() -> None:
    code = "import sys, mmrouter_sidecar.app; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "aiohttp" in loaded
    for unwanted in ("pydantic", "mmrouter_lib.api", "rich", "typer", "kubernetes", "tokenizers", "PIL"):
        assert unwanted not in loaded


def test_only_files_that_affect_prompts_are_digested(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json", "chat_template.jinja", "model-00001.safetensors", "README.md"):
        (tmp_path / name).write_text(name)
    first = metadata.digests(tmp_path)
    assert set(first) == {"tokenizer.json", "config.json", "chat_template.jinja"}
    (tmp_path / "chat_template.jinja").write_text("other")
    second = metadata.digests(tmp_path)
    assert {name for name in first if first[name] != second[name]} == {"chat_template.jinja"}
    assert metadata.digests(tmp_path / "absent") == {}


def test_a_hub_download_is_found_by_branch_and_by_commit(tmp_path: Path) -> None:
    home = tmp_path / "models--org--name"
    assert metadata.hub_folder(tmp_path, "org/name", "main") is None
    (home / "snapshots" / "c0ffee").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("c0ffee\n")
    expected: Any = (home / "snapshots" / "c0ffee", "c0ffee")
    assert metadata.hub_folder(tmp_path, "org/name", "main") == expected
    assert metadata.hub_folder(tmp_path, "org/name", "c0ffee") == expected
    assert metadata.hub_folder(tmp_path, "org/name", "other") is None
