"""Configuration errors of the process: one line that names the cause, and exit status 2."""

import json
import os
import subprocess
import sys

import pytest
import zmq

from mmrouter_router.__main__ import main
from mmrouter_router.core.settings import load

RESOURCE = {
    "apiVersion": "mmrouter.io/v1alpha1",
    "kind": "MMRouterDeployment",
    "metadata": {"name": "t"},
    "spec": {
        "model": {"id": "m"},
        "engine": {"type": "vllm"},
        "pools": [{"name": "worker", "role": "worker", "replicas": 1, "accelerator": {"kind": "cpu"}}],
    },
}


@pytest.fixture
def config(tmp_path):
    """A complete configuration, from which tests remove something."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (tmp_path / "deployment.json").write_text(json.dumps(RESOURCE))
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
def said(config, monkeypatch, capsys):
    """Run the entry point, which must exit with status 2; returns its error output."""

    def run() -> str:
        monkeypatch.setenv("MMROUTER_CONFIG", str(config))
        monkeypatch.setenv("POD_UID", "u")
        monkeypatch.setenv("MMROUTER_MODEL_DIR", str(config))
        assert main() == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("missing", ["identity.key", "control.token"])
def test_missing_secret_is_named(config, said, missing):
    (config / "secrets" / missing).unlink()
    sentence = said()
    assert missing in sentence
    assert sentence.count("\n") == 1


def test_invalid_resource_is_named_by_its_field(config, said):
    bad = {**RESOURCE, "spec": {**RESOURCE["spec"], "engine": {"type": "other"}}}
    (config / "deployment.json").write_text(json.dumps(bad))
    assert "spec.engine" in said()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("MMROUTER_DISCOVERY", "guess", "MMROUTER_DISCOVERY is 'guess': file or kubernetes"),
        ("MMROUTER_DISCOVERY", "kubernetes", "KUBERNETES_SERVICE_HOST is not set"),
        ("MMROUTER_DRAIN_SECONDS", "soon", "MMROUTER_DRAIN_SECONDS is 'soon'"),
        ("MMROUTER_DRAIN_SECONDS", "-1", "MMROUTER_DRAIN_SECONDS is '-1'"),
        ("MMROUTER_SHARED_LIMIT_BYTES", "1Gi", "MMROUTER_SHARED_LIMIT_BYTES is '1Gi'"),
    ],
)
def test_invalid_variable_is_named(said, monkeypatch, name, value, sentence):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv(name, value)
    assert sentence in said()


def test_node_and_shared_folder_come_from_the_environment(config):
    told = {"NODE_NAME": "n-1", "MMROUTER_SHARED_DIR": "/shared", "MMROUTER_SHARED_LIMIT_BYTES": "1024"}
    settings = load({"MMROUTER_CONFIG": str(config), "POD_UID": "u", **told, "MMROUTER_HANDOVER": "always"})
    assert (settings.node, str(settings.shared_dir), settings.shared_limit_bytes) == ("n-1", "/shared", 1024)
    assert settings.always_hand_over
    without = load({"MMROUTER_CONFIG": str(config), "POD_UID": "u", "MMROUTER_SHARED_LIMIT_BYTES": ""})
    assert (without.shared_dir, without.always_hand_over) == (None, False)


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({"POD_IP": "10.0.0.7"}, "10.0.0.7"),
        ({"POD_IP": "10.0.0.7", "MMROUTER_BIND": "all"}, "0.0.0.0"),
        ({"POD_IP": "fd00::7", "MMROUTER_BIND": "all"}, "::"),
    ],
)
def test_router_listens_on_the_pods_address_or_all(config, variables, host):
    """A port-forward connects to the pod's loopback."""
    assert load({"MMROUTER_CONFIG": str(config), "POD_UID": "u", **variables}).host == host


def test_process_without_model_files_exits_with_status_2(config):
    own = {"MMROUTER_CONFIG": str(config), "POD_UID": "u", "MMROUTER_MODEL_DIR": str(config)}
    command = [sys.executable, "-m", "mmrouter_router"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env={**os.environ, **own})
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr
