"""The script that makes helm says where, and why not."""

import os
import subprocess
import sys
from pathlib import Path

from chart.helm import Helm

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "helm_env.py"


def script(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MMROUTER_CACHE": str(cache)}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_the_command_lies_in_the_cache(tmp_path: Path) -> None:
    where = script(tmp_path, "--where")
    assert where.returncode == 0
    assert Path(where.stdout.strip()).parent == tmp_path / "helm"
    assert list(tmp_path.iterdir()) == []


def test_a_helm_that_cannot_be_made_has_a_status_and_one_reason(tmp_path: Path) -> None:
    cache = tmp_path / "file"
    cache.touch()
    made = script(cache)
    assert (made.returncode, made.stdout) == (3, "")
    assert str(cache) in made.stderr.strip().splitlines()[-1]


def test_helm_has_the_version_that_its_folder_says(helm: Helm) -> None:
    assert helm.run("version", "--template={{.Version}}").stdout == f"v{helm.command.parent.name}"
