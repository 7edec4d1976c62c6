"""Build the virtual environment of an older SGLang, which writes one sentinel per image. Prints its path.

    python -m hack.engines.older_sglang_env            # builds it, or finds it ready; prints the path
    python -m hack.engines.older_sglang_env --where    # prints the path only

It holds the one wheel and takes everything else from SGLang's environment (``sglang_env.py``): PyTorch, transformers,
the stubs of compiled kernels, the adaptations to a CPU. It therefore needs seconds and no further gigabytes.
``MMROUTER_SGLANG_WHEEL`` takes another release: lines of a requirements file, with hashes (``adopt.py``). Exit
status: ``hack/build_once.py``.
"""

import inspect
import os
import sys
from functools import partial
from pathlib import Path

from hack.build_once import CannotMakeError, cache_dir, digest, main, pip_install, run
from hack.engines import sglang_env
from hack.engines.sglang_env import FORKS, STARTS
from hack.engines.vllm_env import make, mend

WHEEL = os.environ.get("MMROUTER_SGLANG_WHEEL") or (
    "sglang==0.5.22 --hash=sha256:cc9a0f15bd8f877a0584fdb7a1702240177a1f1cc8d17c978715161717b9037b"
)
"""0.5.22 is the last release with one sentinel per image. On a CPU it needs the same packages as the tested one."""
OLDER = WHEEL.split()[0].removeprefix("sglang==")


def env_dir() -> Path:
    return cache_dir() / "engines" / f"sglang-{OLDER}-cpu"


def recipe() -> str:
    return digest(WHEEL, sglang_env.recipe(), STARTS, FORKS, inspect.getsource(build))


def build(env: Path) -> None:
    full = sglang_env.env_dir()
    make(full, sglang_env.recipe(), sglang_env.build, (sglang_env.additions(), sglang_env.add))
    python = str(env / "bin" / "python")
    site, shared = (Path(run([str(at / "bin" / "python"), "-c", SITE], "python")) for at in (env, full))
    wanted = env / "requirements.txt"
    wanted.write_text(f"{WHEEL}\n")
    arguments = ("--no-deps", "--require-hashes", "--requirement", str(wanted))
    pip_install(python, arguments, f"pip install of sglang {OLDER}")
    # A site folder that another one adds comes behind it, so the older wheel hides the tested one.
    (site / "tested_release.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    mend(site / "sglang" / "srt" / "entrypoints" / "engine.py", STARTS, FORKS, "how SGLang starts its processes")
    version = run([python, "-c", "import sglang.launch_server, sglang.version as v; print(v.__version__)"], "import")
    if version != OLDER:
        raise CannotMakeError(f"the environment holds SGLang {version!r}, not {OLDER}")


SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


if __name__ == "__main__":
    maker = partial(make, recipe=recipe(), build=build)
    sys.exit(main("the environment of an older SGLang", env_dir(), maker))
