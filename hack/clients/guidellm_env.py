"""Install guidellm once, for the interpreter of vLLM's environment, which has PyTorch and most of its other packages.

    python -m hack.clients.guidellm_env    # prints the folder for PYTHONPATH

The versions are those of ``guidellm.lock``. Exit status: ``hack/build_once.py``.
"""

import sys
from pathlib import Path

from hack.build_once import CannotMakeError, build_once, cache_dir, digest, pip_install, status_of
from hack.engines import vllm_env

LOCK = Path(__file__).with_name("guidellm.lock")


def make() -> Path:
    """Return the folder of the packages. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    python = vllm_env.env_dir() / "bin" / "python"

    def require_engine() -> None:
        if not python.is_file():
            raise CannotMakeError("vLLM's environment is not there: python -m hack.engines.vllm_env")

    def build(folder: Path) -> None:
        lock = ("--require-hashes", "--requirement", str(LOCK))
        arguments = ("--target", str(folder), "--no-deps", *lock)
        pip_install(str(python), arguments, "pip install of hack/clients/guidellm.lock")

    folder = cache_dir() / "guidellm"
    recipe = digest(str(python), LOCK.read_text())
    build_once(folder, recipe, build, what="guidellm (once, 30 s)", free_gb=1, require=require_engine)
    return folder


if __name__ == "__main__":
    sys.exit(status_of(lambda: print(make())))
