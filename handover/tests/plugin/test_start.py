"""The installer and the start wrapper, which adds the plugin to those of the image and always starts the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrouter_handover.plugin.install import install
from mmrouter_handover.plugin.start import allow_list, interpreter

INSTALLED = [
    ("vllm.general_plugins", "lora_resolver"),
    ("vllm.platform_plugins", "tpu"),
    ("vllm.endpoint_plugins", "their_routes"),
    ("vllm.io_processor_plugins", "lora_resolver"),
    ("console_scripts", "vllm"),
]


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
def test_plugins_of_the_image_stay_loaded(current: str | None, installed: list[tuple[str, str]], allowed: str):
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
def test_the_interpreter_of_a_script_is_the_python_path_in_its_shebang(shebang: bytes, named: str | None):
    assert interpreter(shebang) == named


def test_a_command_runs_with_its_own_interpreter_and_finds_the_plugin(tmp_path: Path):
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


def test_a_missing_or_unknown_command_is_an_error():
    wrapper = [sys.executable, "-m", "mmrouter_handover.plugin.start"]
    assert subprocess.run(wrapper, capture_output=True, check=False).returncode == 2
    absent = subprocess.run([*wrapper, "no-such-engine"], capture_output=True, text=True, check=False)
    assert absent.returncode != 0
    assert "no-such-engine" in absent.stderr or "No such file" in absent.stderr


def test_the_install_command_reports_what_it_installed_or_cannot_write(tmp_path: Path):
    command = [sys.executable, "-m", "mmrouter_cli", "plugin"]
    made = subprocess.run([*command, str(tmp_path / "plugin")], capture_output=True, text=True, check=True)
    assert "mmrouter_handover" in made.stdout
    (tmp_path / "file").write_text("")
    refused = subprocess.run([*command, str(tmp_path / "file")], capture_output=True, text=True, check=False)
    assert (refused.returncode, "cannot be written" in refused.stderr) == (1, True)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2


def test_installing_again_replaces_the_folder_and_everything_is_world_readable(tmp_path: Path):
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
