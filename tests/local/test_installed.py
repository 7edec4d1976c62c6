"""The installed distribution, away from the checkout."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from local.rig import ROOT


def test_the_demo_runs_from_the_wheel_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = "import mmrouter_cli, mmrouter_cli.__main__ as m; print(mmrouter_cli.__file__, flush=True); m.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "demo", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(str(tmp_path))
    assert json.loads(done.stdout.splitlines()[-1])["passed"] is True
