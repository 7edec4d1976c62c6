"""The installer, the start wrapper (which always starts the engine), and the endpoint, disabled with a reason."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from mmrouter_handover.plugin import PROVED_RELEASES, WIRE_VERSION, wire
from mmrouter_handover.plugin.endpoint import Handover
from mmrouter_handover.plugin.start import allow_list, install, interpreter
from mmrouter_handover.plugin.vllm_items import why_incompatible, why_unsupported
from mmrouter_lib.engines.vllm import plugin_api as vllm_handover

INSTALLED = [
    ("vllm.general_plugins", "lora_resolver"),
    ("vllm.platform_plugins", "tpu"),
    ("vllm.endpoint_plugins", "their_routes"),
    ("vllm.io_processor_plugins", "lora_resolver"),
    ("console_scripts", "vllm"),
]
ROUTES = (wire.RENDER_PATH, wire.ITEMS_PATH, wire.RELEASE_PATH)


@pytest.mark.parametrize(
    ("current", "installed", "allowed"),
    [
        # Unset loads every group but endpoint plugins, so all but those are named.
        (None, INSTALLED, "lora_resolver,tpu,mmrouter"),
        (None, [], "mmrouter"),
        ("tpu", INSTALLED, "tpu,mmrouter"),
        ("", INSTALLED, "mmrouter"),
        ("their_routes,mmrouter", INSTALLED, "their_routes,mmrouter"),
    ],
)
def test_plugins_of_the_image_stay_loaded(current, installed, allowed):
    assert allow_list(current, installed) == allowed


@pytest.mark.parametrize(
    ("shebang", "named"),
    [
        (b"#!/opt/venv/bin/python3\nimport sys", "/opt/venv/bin/python3"),
        (b"#! /usr/bin/python3.12 -I\n", "/usr/bin/python3.12"),
        (b"#!/bin/sh\n'''exec' /x/python", None),
        (b"#!/usr/bin/env python3\n", None),
        (b"\x7fELF\xff", None),
        (b"", None),
    ],
)
def test_the_interpreter_of_a_script_is_the_python_path_in_its_shebang(shebang, named):
    assert interpreter(shebang) == named


def test_a_command_runs_with_its_own_interpreter_and_finds_the_plugin(tmp_path):
    """A script with another interpreter stands in for ``vllm``, in an image with a plugin of its own."""
    install(tmp_path / "plugin")
    other = tmp_path / "python-of-the-image"
    other.symlink_to(sys.executable)
    image = tmp_path / "image" / "their-1.dist-info"
    image.mkdir(parents=True)
    (image / "METADATA").write_text("Metadata-Version: 2.1\nName: their\nVersion: 1\n")
    (image / "entry_points.txt").write_text("[vllm.general_plugins]\ntheirs = their:plugin\n")
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text(
        f"#!{other}\n"
        "import json, os, sys\n"
        "from importlib.metadata import entry_points\n"
        "points = [point.value for point in entry_points(group='vllm.endpoint_plugins')]\n"
        "print(json.dumps([sys.executable, sys.argv[1:], os.environ['VLLM_PLUGINS'], points,\n"
        "                  'MMROUTER_START_INTERPRETER' in os.environ]))\n"
    )
    script.chmod(0o755)
    libraries = next(path for path in sys.path if path.endswith("site-packages"))
    environ = {
        "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join((str(tmp_path / "plugin"), str(image.parent), libraries)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "mmrouter_handover.plugin.start", "vllm", "serve", "--port", "1"]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, cwd=tmp_path)
    executable, arguments, allowed, points, still = json.loads(ran.stdout)
    assert executable == str(other)
    assert arguments == ["serve", "--port", "1"]
    assert {"theirs", "mmrouter"} <= set(allowed.split(","))
    assert points == ["mmrouter_handover.plugin.endpoint:Handover"]
    assert not still


@pytest.mark.parametrize(
    ("module", "argument", "status", "output"),
    [
        ("mmrouter_handover.plugin.start", None, 2, "usage"),
        ("mmrouter_handover.plugin.start", "no-such-engine", 1, "No such file"),
        ("mmrouter_cli", "plugin", 0, "mmrouter_handover"),
        ("mmrouter_cli", "file", 1, "cannot be written"),
        ("mmrouter_cli", None, 2, "usage"),
    ],
)
def test_commands_report_what_they_did_or_cannot_do(tmp_path, module, argument, status, output):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", module, *(["plugin"] if module == "mmrouter_cli" else [])]
    command += [argument] if argument else []
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ran.returncode, output in ran.stdout + ran.stderr) == (status, True)


def test_the_metadata_declares_the_releases_that_the_plugin_was_proved_with(tmp_path):
    install(tmp_path)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert f"Requires-External: vllm ({' || '.join(PROVED_RELEASES)})" in metadata.read_text().splitlines()


def test_installing_again_replaces_the_folder_and_everything_is_world_readable(tmp_path):
    folder = tmp_path / "plugin"
    names = install(folder)
    (folder / "mmrouter_handover" / "plugin" / "left_by_an_older_release.py").write_text("")
    (folder / "mmrouter_plugin-0.0.1.dist-info").mkdir()
    assert install(folder) == names
    assert sorted(path.name for path in folder.iterdir()) == names
    assert not (folder / "mmrouter_handover" / "plugin" / "left_by_an_older_release.py").exists()
    assert not list(folder.rglob("__pycache__"))
    for path in folder.rglob("*"):
        assert path.stat().st_mode & 0o044 == 0o044, path
        assert path.is_file() or path.stat().st_mode & 0o011 == 0o011, path


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make ``import vllm`` return a stub of a release. The real one runs in tests/conformance."""

    def stub(version: str) -> None:
        module = ModuleType("vllm")
        module.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", module)

    return stub


async def send(plugin: Handover, method: str, path: str) -> httpx.Response:
    app = FastAPI()
    plugin.attach_router(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        return await client.request(method, path, json={})


@pytest.mark.parametrize(
    ("version", "renderer", "message"),
    [
        ("0.34.0", None, "vLLM 0.34.0 is not known"),
        ("0.32.1", None, "vLLM 0.32.1 is not known"),
        (f"{PROVED_RELEASES[0]}+cpu", None, "this vLLM's renderer has no _mm_executor"),
    ],
)
async def test_an_unsupported_vllm_disables_the_plugin_with_a_reason(release, version, renderer, message):
    release(version)
    plugin = Handover()
    state = SimpleNamespace(online_renderer=SimpleNamespace(renderer=renderer))
    await plugin.init_state(object(), state, SimpleNamespace())
    status = vllm_handover.read_status((await send(plugin, "GET", wire.STATUS_PATH)).content)
    assert (status.enabled, status.version, status.role) == (False, WIRE_VERSION, "engine")
    assert message in status.reason
    assert not any(status.offers(way) for way in vllm_handover.WAYS)
    for path in ROUTES:
        answer = await send(plugin, "POST", path)
        assert answer.status_code == 503
        assert message in answer.json()["error"]["message"]


async def test_an_exception_at_startup_disables_the_plugin_with_a_reason(release):
    release(PROVED_RELEASES[0])
    plugin = Handover()
    cache = SimpleNamespace(**dict.fromkeys(("is_cached_item", "get_and_update_item", "touch_sender_cache_item")))
    cache.release_sender_touches = cache.clear_cache = None
    renderer = SimpleNamespace(_mm_executor=1, _mm_processor_cache=cache, _mm_processor_only_cache=cache)
    renderer.mm_processor = renderer.model_config = renderer
    renderer.info = SimpleNamespace(supported_mm_limits={"image": None})
    await plugin.init_state(None, SimpleNamespace(online_renderer=SimpleNamespace(renderer=renderer)), None)
    why = "it failed to start: AttributeError: 'types.SimpleNamespace' object has no attribute 'config'"
    assert (plugin.role, plugin.disabled) == ("renderer", why)
    assert renderer._mm_processor_cache is cache


def test_a_server_without_a_needed_attribute_is_incompatible():
    assert why_unsupported(PROVED_RELEASES[0]) == why_unsupported(PROVED_RELEASES[0] + "+cpu") == ""
    whole = SimpleNamespace(_mm_executor=1, _mm_processor_cache=None, _mm_processor_only_cache=None, model_config=1)
    whole.mm_processor = None
    assert why_incompatible(whole, "_mm_processor_cache") == "the model takes no images"
    whole.mm_processor = SimpleNamespace(info=SimpleNamespace(supported_mm_limits={"vision_chunk": None}))
    assert why_incompatible(whole, "_mm_processor_cache") == "the model has no kind of media of its own for images"
    whole.mm_processor.info.supported_mm_limits = {"image": None}
    assert "without a processor cache" in why_incompatible(whole, "_mm_processor_cache")
    whole._mm_processor_cache = object()
    assert why_incompatible(whole, "_mm_processor_cache") == "this vLLM's processor cache has no is_cached_item"


def test_the_router_and_the_plugin_have_the_same_routes_and_constants():
    names = ("STATUS_PATH", "RENDER_PATH", "ITEMS_PATH", "RELEASE_PATH", "WIRE_VERSION", "WAYS")
    theirs = {**vars(wire), "WIRE_VERSION": WIRE_VERSION}
    assert [getattr(vllm_handover, name) for name in names] == [theirs[name] for name in names]
