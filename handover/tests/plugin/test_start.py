"""The wrapper keeps every plugin of an image, adds ours, and never keeps an engine from starting."""

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
    ("said", "installed", "allowed"),
    [
        # Unset loads all groups but the endpoints', so all these are named and no endpoint of others is.
        (None, INSTALLED, "lora_resolver,tpu,mmrouter"),
        (None, [], "mmrouter"),
        ("tpu", INSTALLED, "tpu,mmrouter"),
        ("", INSTALLED, "mmrouter"),
        ("their_routes,mmrouter", INSTALLED, "their_routes,mmrouter"),
    ],
)
def test_what_would_be_loaded_without_us_is_loaded_with_us(
    said: str | None, installed: list[tuple[str, str]], allowed: str
):
    assert allow_list(said, installed) == allowed


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
def test_the_interpreter_of_a_script_is_its_first_line_where_that_names_one_by_its_path(
    shebang: bytes, named: str | None
):
    assert interpreter(shebang) == named


def test_a_command_runs_with_its_own_interpreter_its_arguments_and_the_plugin_in_sight(tmp_path: Path):
    """A stand-in for ``vllm``: a script of another interpreter, in an image with a plugin of its own."""
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


def test_no_command_is_a_wrong_use_and_a_command_that_is_not_there_is_said_to_be_so():
    wrapper = [sys.executable, "-m", "mmrouter_handover.plugin.start"]
    assert subprocess.run(wrapper, capture_output=True, check=False).returncode == 2
    absent = subprocess.run([*wrapper, "no-such-engine"], capture_output=True, text=True, check=False)
    assert absent.returncode != 0
    assert "no-such-engine" in absent.stderr or "No such file" in absent.stderr


def test_the_command_that_an_init_container_runs_says_what_it_put_where_and_what_it_cannot_write(tmp_path: Path):
    command = [sys.executable, "-m", "mmrouter_cli", "plugin"]
    made = subprocess.run([*command, str(tmp_path / "plugin")], capture_output=True, text=True, check=True)
    assert "mmrouter_handover" in made.stdout
    (tmp_path / "file").write_text("")
    refused = subprocess.run([*command, str(tmp_path / "file")], capture_output=True, text=True, check=False)
    assert (refused.returncode, "cannot be written" in refused.stderr) == (1, True)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2


def test_the_folder_is_made_anew_as_a_whole_and_everybody_may_read_it(tmp_path: Path):
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
