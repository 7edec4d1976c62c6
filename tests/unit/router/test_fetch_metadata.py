"""Download of a model's metadata from a local server that implements the hub's HTTP API."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from mmrouter_lib import metadata_digests as metadata

COMMIT, OLDER = "a" * 40, "b" * 40
TOKEN = "hf_secret"
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


class Hub(ThreadingHTTPServer):
    """One repository at two commits; `main` is the newer one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(FILES)
        self.private = False
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        if self.server.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        elif path.startswith("/api/models/org/model"):
            self._api(path)
        elif path.startswith("/org/model/resolve/"):
            self._file(*path.removeprefix("/org/model/resolve/").split("/", 1))
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    def _api(self, path: str) -> None:
        parts = path.removeprefix("/api/models/org/model").strip("/").split("/")
        revision = parts[1] if len(parts) > 1 else "main"
        commit = {"main": COMMIT, COMMIT: COMMIT, OLDER: OLDER}.get(revision)
        if commit is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return
        if parts[0] == "tree":
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.server.files.items()
            ]
            self._send(200, json.dumps(files).encode(), {"Content-Type": "application/json"})
            return
        siblings = [{"rfilename": name} for name in self.server.files]
        said = {"id": "org/model", "modelId": "org/model", "sha": commit, "siblings": siblings, "private": False}
        self._send(200, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def _file(self, commit: str, name: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        data += commit[:1].encode() if name == "merges.txt" else b""
        self._send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
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


def run(folder: Path, endpoint: str, model: dict[str, Any], **env: str) -> subprocess.CompletedProcess[str]:
    """Run the init container's command with the files and environment of its pod."""
    config, target = folder / "config", folder / "model"
    for made in (config, target):
        made.mkdir(exist_ok=True)
    resource = {
        "apiVersion": "mmrouter.io/v1alpha1",
        "kind": "MMRouterDeployment",
        "metadata": {"name": "vl", "namespace": "default"},
        "spec": {
            "model": {"id": "org/model"} | model,
            "engine": {"type": "vllm"},
            "pools": [{"name": "worker", "role": "worker", "accelerator": {"kind": "cpu"}}],
        },
    }
    (config / "deployment.json").write_text(json.dumps(resource))
    return subprocess.run(
        [sys.executable, "-m", "mmrouter_cli", "fetch-metadata"],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "HF_ENDPOINT": endpoint,
            "MMROUTER_CONFIG": str(config),
            "MMROUTER_MODEL_DIR": str(target),
            **env,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def fetched(folder: Path) -> set[str]:
    model = folder / "model"
    files = (path.relative_to(model) for path in model.rglob("*") if path.is_file())
    return {str(path) for path in files if not str(path).startswith(".cache")}


def test_metadata_files_are_downloaded_and_weights_are_not(hub: Hub, tmp_path: Path) -> None:
    done = run(tmp_path, hub.url, {})
    assert done.returncode == 0, done.stderr
    assert fetched(tmp_path) == WANTED
    assert (tmp_path / "model" / "config.json").read_bytes() == FILES["config.json"]
    assert f"org/model at commit {COMMIT}" in done.stderr
    assert not [path for path in hub.asked if "safetensors" in path or "onnx" in path]
    # These digests are compared with those of the engine's files.
    assert set(metadata.digests(tmp_path / "model")) == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "preprocessor_config.json",
        "chat_template.jinja",
    }


def test_all_files_are_of_one_commit_which_can_be_pinned(hub: Hub, tmp_path: Path) -> None:
    assert run(tmp_path, hub.url, {"revision": OLDER}).returncode == 0
    assert (tmp_path / "model" / "merges.txt").read_bytes() == b"a bb"
    assert {path.split("/")[4] for path in hub.asked if "/resolve/" in path} == {OLDER}
    hub.asked.clear()
    assert run(tmp_path, hub.url, {}).returncode == 0
    assert (tmp_path / "model" / "merges.txt").read_bytes() == b"a ba"
    assert {path.split("/")[4] for path in hub.asked if "/resolve/" in path} == {COMMIT}


def test_private_repository_requires_the_token(hub: Hub, tmp_path: Path) -> None:
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
    ("model", "said"), [({"revision": "none"}, "org/model at none: "), ({"id": "org/other"}, "org/other at main: ")]
)
def test_missing_repository_or_revision_is_reported(hub: Hub, tmp_path: Path, model: dict[str, Any], said: str) -> None:
    done = run(tmp_path, hub.url, model)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"mmrouter fetch-metadata: {said}")


def test_repository_without_config_json_is_an_error(hub: Hub, tmp_path: Path) -> None:
    del hub.files["config.json"]
    done = run(tmp_path, hub.url, {})
    assert (done.returncode, "has no config.json" in done.stderr) == (1, True)


def test_unreachable_hub_exits_with_the_retry_status(tmp_path: Path) -> None:
    with serving() as gone:
        url = gone.url
    done = run(tmp_path, url, {})
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_missing_resource_exits_with_the_configuration_status(hub: Hub, tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "MMROUTER_CONFIG": str(tmp_path), "HF_ENDPOINT": hub.url}
    done = subprocess.run(
        [sys.executable, "-m", "mmrouter_cli", "fetch-metadata"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert hub.asked == []
