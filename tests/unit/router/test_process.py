"""The process says what is wrong with its configuration in one line, and leaves with status 2."""

import json
import os
import subprocess
import sys

import pytest
import zmq

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
    """A whole configuration; tests take something away."""
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


def start(config, **env):
    own = {"MMROUTER_CONFIG": str(config), "POD_UID": "u", "MMROUTER_MODEL_DIR": str(config), **env}
    return subprocess.run(
        [sys.executable, "-m", "mmrouter_router"], capture_output=True, text=True, timeout=30, env={**os.environ, **own}
    )


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("secrets/identity.key", "identity.key"),
        ("secrets/control.token", "control.token"),
        ("nothing", "config.json"),  # all is there but the model folder's files
    ],
)
def test_what_is_missing_is_named(config, missing, says):
    (config / missing).unlink(missing_ok=True)
    done = start(config)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_resource_is_named_by_its_field(config):
    bad = {**RESOURCE, "spec": {**RESOURCE["spec"], "engine": {"type": "other"}}}
    (config / "deployment.json").write_text(json.dumps(bad))
    done = start(config)
    assert done.returncode == 2
    assert "spec.engine" in done.stderr
