"""Fetch the build of Mooncake without CUDA, by which SGLang hands KV blocks over between CPUs. Prints its folder.

    python -m hack.engines.mooncake_package            # fetches it, or finds it ready; prints the folder
    python -m hack.engines.mooncake_package --where    # prints the folder only

The folder is for ``PYTHONPATH`` of SGLang's environment (``sglang_env.py``), which has no Mooncake: the usual build
loads ``libcudart.so.12``. Needs Debian's libibverbs1. The folder's start-up file has SGLang's sender take page indices
without CUDA's events and pinned memory, as other senders do. Exit status: ``hack/build_once.py``.
"""

import inspect
import os
import sys
from pathlib import Path

from hack.build_once import (
    CannotMakeError,
    build_once,
    cache_dir,
    captured,
    digest,
    last_line,
    main,
    pip_install,
    quiet_env,
)
from hack.engines import sglang_env, vllm_env

START_UP = '''"""Let SGLang's sender for Mooncake take page indices without CUDA's events and pinned memory."""
import sys
from importlib.machinery import PathFinder

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "sglang.srt.disaggregation.mooncake.conn":
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def load(module):
            execute(module)
            module.MooncakeKVSender.supports_host_tensor_indices = False

        spec.loader.exec_module = load
        return spec

sys.meta_path.insert(0, Finder)
'''
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"


def env_dir() -> Path:
    return cache_dir() / "engines" / MOONCAKE.replace("==", "-")


def make(folder: Path) -> None:
    """Fetch the package unless it is there. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    recipe = digest(MOONCAKE, START_UP, sglang_env.recipe(), inspect.getsource(build))
    build_once(folder, recipe, build, what="Mooncake (seconds)", free_gb=0.5)


def build(folder: Path) -> None:
    env = sglang_env.env_dir()
    vllm_env.make(env, sglang_env.recipe(), sglang_env.build, (sglang_env.additions(), sglang_env.add))
    python = str(env / "bin" / "python")
    pip_install(python, ["--no-deps", f"--target={folder}", MOONCAKE], "pip install of Mooncake")
    (folder / "sitecustomize.py").write_text(START_UP)
    done = captured([python, "-c", "import mooncake.engine"], env={**quiet_env(), "PYTHONPATH": os.fspath(folder)})
    if done.returncode != 0:
        raise CannotMakeError(f"Mooncake does not load here (Debian: libibverbs1): {last_line(done.stderr)}")


if __name__ == "__main__":
    sys.exit(main("Mooncake without CUDA", env_dir(), make))
