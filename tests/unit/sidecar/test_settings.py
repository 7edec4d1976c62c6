"""The settings of a sidecar."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmrouter_lib import model_folder as metadata
from mmrouter_lib.block_keys import namespace_seed
from mmrouter_lib.settings_errors import SettingsError
from mmrouter_sidecar.settings import Settings, from_json, to_json
from mmrouter_sidecar.settings_loader import load


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


@pytest.mark.parametrize(("args", "shows"), [([], True), (["--kv-cache-memory-bytes=4096"], False)])
def test_metrics_show_a_cpu_unless_arguments_set_the_size_of_the_cache(
    environment: dict[str, str], args: list[str], shows: bool
) -> None:
    file = Path(environment["MMROUTER_CONFIG"]) / "deployment.json"
    resource = json.loads(file.read_text())
    resource["spec"]["pools"][0]["args"] = args
    file.write_text(json.dumps(resource))
    assert load(environment).metrics_show_cpu is shows


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


def test_a_sidecar_that_is_stopped_while_it_starts_leaves_no_traceback(environment: dict[str, str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "mmrouter_sidecar.settings_loader"]
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, env={**os.environ, **environment}
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
