"""Every supported Python release compiles the sources and passes the library's tests, with the versions of the lock.

A release whose tests passed with the same files before, as a stamp in its environment says, does not run them again.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from unit.hack.test_programs import command

from hack.build_once import ROOT, CannotMakeError, digest, is_stamped
from hack.python_envs import RELEASES, find_python, make

OTHERS = [release for release in RELEASES if release != "{}.{}".format(*sys.version_info[:2])]
FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["dev-mode-dirs"]
LIBRARY_TESTS = [f"tests/unit/{name}" for name in ("api", "families", "feed", "imagesize")]
FILES = (
    *("pyproject.toml", "mmrouter/**/*.py", "examples/*.yaml", "crds/*.yaml", "tests/*.py", "tests/unit/*.py"),
    *(f"{folder}/**/*.py" for folder in LIBRARY_TESTS),
)
"""What the library's tests read of the repository, and the examples that they parse."""


def passed(argv: list[str]) -> None:
    """Run a command with this checkout's packages. Raises ``AssertionError`` with its output when it fails."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in FOLDERS)}
    done = subprocess.run(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("release", OTHERS)
def test_a_release_compiles_the_sources_and_passes_the_librarys_tests(release: str) -> None:
    try:
        env = make(release)
    except CannotMakeError as error:
        pytest.skip(f"not run: {error}")
    # Bytecode stays with the environment: the next run compiles only what changed, and what failed to compile.
    python = [str(env / "bin" / "python"), "-X", f"pycache_prefix={env / 'pycache'}"]
    passed([*python, "-W", "error", "-m", "compileall", "-q", *FOLDERS])
    files = sorted(file for pattern in FILES for file in ROOT.glob(pattern))
    stamp, state = env / "passed", digest(*(f"{file.relative_to(ROOT)}\0{file.read_text()}" for file in files))
    if not is_stamped(stamp, state):
        passed([*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *LIBRARY_TESTS])
        stamp.write_text(state)


def test_an_interpreter_of_another_release_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, "python3.12", "echo 3.11")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(CannotMakeError, match=r"^no python3\.12$"):
        find_python("3.12")


def test_the_supported_releases_begin_with_requires_python() -> None:
    assert f'requires-python = ">={RELEASES[0]}"' in (ROOT / "pyproject.toml").read_text()
