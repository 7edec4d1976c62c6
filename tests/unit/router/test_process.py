"""Configuration errors of a pod's commands, and the download of a model's metadata from a local hub."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from hub_server import COMMIT, OLDER, TOKEN, Hub
from unit.router.rig import manifest

from mmrouter_lib import model_folder as metadata
from mmrouter_router.__main__ import main
from mmrouter_router.core.settings import load


@pytest.fixture
def config(tmp_path):
    """A complete configuration, from which tests remove something."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (tmp_path / "deployment.json").write_text(json.dumps(manifest()))
    router, sidecar = zmq.curve_keypair(), zmq.curve_keypair()
    files = {
        "identity.key": bytes(32),
        "engine.key": b"k",
        "control.token": b"t",
        "router.curve.public": router[0],
        "router.curve.secret": router[1],
        "sidecar.curve.public": sidecar[0],
    }
    for name, content in files.items():
        (secrets / name).write_bytes(content)
    return tmp_path


@pytest.fixture
def environment(config):
    return {"MMROUTER_CONFIG": str(config), "POD_UID": "u"}


@pytest.fixture
def complaint(environment, config, monkeypatch, capsys):
    """Run the entry point with these variables, which must exit with status 2; returns its error output."""

    def run(**variables: str) -> str:
        for name, value in {**environment, "MMROUTER_MODEL_DIR": str(config), **variables}.items():
            monkeypatch.setenv(name, value)
        assert main() == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("missing", ["secrets/identity.key", "secrets/control.token", "deployment.json"])
def test_a_missing_file_is_named(config, complaint, missing):
    (config / missing).unlink()
    sentence = complaint()
    assert missing in sentence
    assert sentence.count("\n") == 1


def test_invalid_resource_is_named_by_its_field(config, complaint):
    (config / "deployment.json").write_text(json.dumps(manifest(engine={"type": "other"})))
    assert "spec.engine" in complaint()


@pytest.mark.parametrize(
    "setting", ["DRAIN_SECONDS=soon", "DRAIN_SECONDS=-1", "SHARED_LIMIT_BYTES=1Gi", "LOG_LEVEL=loud"]
)
def test_invalid_variable_is_named(complaint, setting):
    name, _, value = f"MMROUTER_{setting}".partition("=")
    assert f"{name} is '{value}'" in complaint(**{name: value})


def test_discovery_is_by_file_or_by_a_cluster_that_is_there(complaint, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert "MMROUTER_DISCOVERY is 'guess': file or kubernetes" in complaint(MMROUTER_DISCOVERY="guess")
    assert "KUBERNETES_SERVICE_HOST is not set" in complaint(MMROUTER_DISCOVERY="kubernetes")


def test_node_and_shared_folder_come_from_the_environment(environment):
    node = {"NODE_NAME": "n-1", "MMROUTER_SHARED_DIR": "/shared", "MMROUTER_SHARED_LIMIT_BYTES": "1024"}
    settings = load({**environment, **node, "MMROUTER_HANDOVER": "always"})
    assert (settings.node, str(settings.shared_dir), settings.shared_limit_bytes) == ("n-1", "/shared", 1024)
    assert settings.always_hand_over
    without = load({**environment, "MMROUTER_SHARED_LIMIT_BYTES": ""})
    assert (without.shared_dir, without.always_hand_over) == (None, False)


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({"POD_IP": "10.0.0.7"}, "10.0.0.7"),
        ({"POD_IP": "10.0.0.7", "MMROUTER_BIND": "all"}, "0.0.0.0"),
        ({"POD_IP": "fd00::7", "MMROUTER_BIND": "all"}, "::"),
    ],
)
def test_router_listens_on_the_pods_address_or_all(environment, variables, host):
    """A port-forward connects to the pod's loopback."""
    assert load({**environment, **variables}).host == host


def test_process_without_model_files_exits_with_status_2(environment, config):
    own = {**os.environ, **environment, "MMROUTER_MODEL_DIR": str(config)}
    command = [sys.executable, "-m", "mmrouter_router"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=own)
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


FILES = {
    "config.json": b'{"model_type": "qwen2_vl"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "preprocessor_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b",
    "model-00001-of-00001.safetensors": b"weights" * 1000,
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "onnx/config.json": b'{"model_type": "another"}',
    "README.md": b"# A model",
}
WANTED = {name for name in FILES if name.endswith((".json", ".jinja", ".txt")) and "/" not in name} - {
    "model.safetensors.index.json"
}


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub(FILES)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


def fetch(**env: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mmrouter_cli", "fetch-metadata"]
    own = {"PATH": os.environ["PATH"], **{name: str(value) for name, value in env.items()}}
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=600)


def run(folder: Path, endpoint: str, model: dict[str, Any], **env: str) -> subprocess.CompletedProcess[str]:
    """Run the init container's command with the files and environment of its pod."""
    config, target = folder / "config", folder / "model"
    for made in (config, target):
        made.mkdir(exist_ok=True)
    (config / "deployment.json").write_text(json.dumps(manifest(model={"id": "org/model"} | model)))
    return fetch(HOME=folder / "home", HF_ENDPOINT=endpoint, MMROUTER_CONFIG=config, MMROUTER_MODEL_DIR=target, **env)


def fetched(folder: Path) -> set[str]:
    model = folder / "model"
    files = (path.relative_to(model) for path in model.rglob("*") if path.is_file())
    return {str(path) for path in files if not str(path).startswith(".cache")}


def test_metadata_files_are_downloaded_and_weights_are_not(hub, tmp_path):
    done = run(tmp_path, hub.url, {})
    assert done.returncode == 0, done.stderr
    assert fetched(tmp_path) == WANTED
    assert (tmp_path / "model" / "config.json").read_bytes() == FILES["config.json"]
    assert f"org/model at commit {COMMIT}" in done.stderr
    assert not [path for path in hub.asked if "safetensors" in path or "onnx" in path]
    # These digests are compared with those of the engine's files.
    assert set(metadata.digests(tmp_path / "model")) == WANTED


def test_weights_in_mistrals_format_leave_empty_files_by_which_the_tokenizer_is_known(hub, tmp_path):
    own = {"consolidated-00001-of-00002.safetensors": b"weights", "consolidated.safetensors.index.json": b"{}"}
    hub.files |= own | {"tekken.json": b"{}", "old/consolidated.safetensors": b"weights"}
    assert run(tmp_path, hub.url, {}).returncode == 0
    assert fetched(tmp_path) == WANTED | {"tekken.json", "consolidated-00001-of-00002.safetensors"}
    assert (tmp_path / "model" / "consolidated-00001-of-00002.safetensors").read_bytes() == b""


def test_all_files_are_of_one_commit_which_can_be_pinned(hub, tmp_path):
    for model, commit in (({"revision": OLDER}, OLDER), ({}, COMMIT)):
        hub.asked.clear()
        assert run(tmp_path, hub.url, model).returncode == 0
        assert (tmp_path / "model" / "merges.txt").read_bytes() == b"a b" + commit[:1].encode()
        assert {path.split("/")[4] for path in hub.asked if "/resolve/" in path} == {commit}


def test_private_repository_requires_the_token(hub, tmp_path):
    hub.private = True
    refused = run(tmp_path, hub.url, {})
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("mmrouter fetch-metadata: org/model at main: ")
    assert fetched(tmp_path) == set()
    allowed = run(tmp_path, hub.url, {}, HF_TOKEN=TOKEN)
    assert allowed.returncode == 0, allowed.stderr
    assert fetched(tmp_path) == WANTED
    assert TOKEN not in refused.stderr + allowed.stderr


@pytest.mark.parametrize(
    ("model", "cause"), [({"revision": "none"}, "org/model at none: "), ({"id": "org/other"}, "org/other at main: ")]
)
def test_missing_repository_or_revision_is_reported(hub, tmp_path, model, cause):
    done = run(tmp_path, hub.url, model)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"mmrouter fetch-metadata: {cause}")


def test_repository_without_config_json_is_an_error(hub, tmp_path):
    del hub.files["config.json"]
    done = run(tmp_path, hub.url, {})
    assert (done.returncode, "has no config.json" in done.stderr) == (1, True)


def test_unreachable_hub_exits_with_the_retry_status(tmp_path: Path) -> None:
    with serving() as gone:
        url = gone.url
    done = run(tmp_path, url, {})
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_missing_resource_exits_with_the_configuration_status(hub, tmp_path):
    assert fetch(MMROUTER_CONFIG=tmp_path, HF_ENDPOINT=hub.url).returncode == 2
    assert hub.asked == []
