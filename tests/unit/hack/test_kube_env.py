"""The control plane is built once, and where it cannot be the reason is one line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "hack"


def script(path: str, cache: Path, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "kube_env.py"), *arguments]
    if code:
        command = [sys.executable, "-c", code]
    env = {**os.environ, "MMROUTER_CACHE": str(cache), "PATH": path, "PYTHONPATH": str(TOOLS)}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def command(folder: Path, name: str, says: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho {says}\n")
    (folder / name).chmod(0o755)


def test_the_folder_lies_in_the_cache_and_names_the_version(tmp_path: Path) -> None:
    where = script("", tmp_path, "--where")
    assert where.returncode == 0
    assert re.fullmatch(rf"{tmp_path}/cluster/1\.35\.4-[0-9a-f]{{8}}\n", where.stdout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("there", "missing"), [((), "etcd"), (("etcd",), "openssl")])
def test_a_missing_command_is_the_reason(tmp_path: Path, there: tuple[str, ...], missing: str) -> None:
    for name in there:
        command(tmp_path / "bin", name)
    made = script(str(tmp_path / "bin"), tmp_path)
    assert (made.returncode, made.stdout) == (3, "")
    assert made.stderr.startswith(f"there is no {missing} here (Debian: ")


GO = "import kube_env; kube_env.GO_PLACES = (); print(kube_env.find_go())"


def test_without_go_nothing_is_built(tmp_path: Path) -> None:
    made = script(str(tmp_path), tmp_path, code=GO)
    assert "there is no Go here to build Kubernetes 1.35.4 with" in made.stderr


@pytest.mark.parametrize(
    ("says", "reason"), [("go1.19.8", "is go1.19.8, Kubernetes 1.35.4 needs go 1.25"), ("", "broken")]
)
def test_a_go_that_is_too_old_is_not_used(tmp_path: Path, says: str, reason: str) -> None:
    command(tmp_path / "bin", "go", says)
    assert reason in script(str(tmp_path / "bin"), tmp_path, code=GO).stderr


def test_a_newer_go_is_used(tmp_path: Path) -> None:
    command(tmp_path / "bin", "go", "go1.30")
    assert script(str(tmp_path / "bin"), tmp_path, code=GO).stdout == f"{tmp_path}/bin/go\n"
