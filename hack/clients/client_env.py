"""Install the client libraries of ``tests/clients`` once: a virtual environment, and Node's packages beside it.

    python -m hack.clients.client_env    # prints the folder: bin/python, node/node_modules

The versions are those of ``build.lock`` (pip) and ``package-lock.json`` (npm). Exit status: ``hack/build_once.py``.
"""

import shutil
import sys
from pathlib import Path

from hack.build_once import CannotMakeError, build_once, cache_dir, digest, interpreter, pip_install, run, status_of

HERE = Path(__file__).parent
LOCK, PACKAGES = HERE / "build.lock", (HERE / "package.json", HERE / "package-lock.json")


def make() -> Path:
    """Return the folder of the environment. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    recipe = digest(interpreter(), *(file.read_text() for file in (LOCK, *PACKAGES)))
    folder = cache_dir() / "clients"
    build_once(folder, recipe, build, what="client libraries (once, a minute)", free_gb=2, require=require_npm)
    return folder


def require_npm() -> None:
    if shutil.which("npm") is None:
        raise CannotMakeError("no npm")


def build(folder: Path) -> None:
    run([sys.executable, "-m", "venv", str(folder)], "python -m venv")
    wanted = ("--require-hashes", "--requirement", str(LOCK))
    pip_install(str(folder / "bin" / "python"), wanted, "pip install of hack/clients/build.lock")
    node = folder / "node"
    node.mkdir()
    for file in PACKAGES:
        shutil.copy(file, node)
    run(["npm", "ci", "--prefix", str(node), "--no-audit", "--no-fund", "--ignore-scripts"], "npm ci")


if __name__ == "__main__":
    sys.exit(status_of(lambda: print(make())))
